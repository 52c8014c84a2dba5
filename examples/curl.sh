#!/bin/sh
# The gateway by curl: the models, a chat that streams, a completion. Start `ekiden up` first.
set -eu
url=${1:-http://127.0.0.1:8000}

echo "# models"
curl -fsS "$url/v1/models"
model=$(curl -fsS "$url/v1/models" | sed 's/.*"id": *"\([^"]*\)".*/\1/')

echo
echo "# a chat, streamed; the last event before [DONE] has the usage"
curl -fsSN "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "{
  \"model\": \"$model\",
  \"messages\": [{\"role\": \"user\", \"content\": \"What is a relay race?\"}],
  \"max_tokens\": 48,
  \"temperature\": 0,
  \"stream\": true,
  \"stream_options\": {\"include_usage\": true}
}"

echo "# a completion, whole"
curl -fsS "$url/v1/completions" -H 'Content-Type: application/json' -d "{
  \"model\": \"$model\",
  \"prompt\": \"The first runner hands the sash to\",
  \"max_tokens\": 16,
  \"temperature\": 0
}"
echo
