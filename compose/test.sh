#!/usr/bin/env bash
# Builds and runs compose.yaml on a real Docker engine; prints a transcript; exits 0 if all held.
#
#   compose/test.sh
#
# Needs docker with compose v2, and curl. BASE_IMAGE, WHEELS, TORCH, EKIDEN_TORCH and PIP_* reach
# the build (see Dockerfile). It runs under a project name, a port and secrets of its own, so a
# deployment that is up already is left alone, and everything it made is removed at the end.
#
#   1. the workers and the gateway start before Redis exists, and come up once it does
#   2. a chat, prefilled on one replica and decoded on another
#   3. a second decode replica joins; a chat
#   4. the decode replica that holds a stream is killed: the stream ends in an error event
#   5. the next chat gives the right answer from the other replica, and no block is held
#   6. everything is stopped in mid-stream: the stream ends whole, every service with exit code 0
set -euo pipefail
cd "$(dirname "$0")/.."

export COMPOSE_ANSI=never COMPOSE_FILE=compose/compose.yaml COMPOSE_PROJECT_NAME="ekiden-test-$$"
export EKIDEN_TAG="test-$$" EKIDEN_PORT=0
EKIDEN_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
EKIDEN_API_KEY=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export EKIDEN_SECRET EKIDEN_API_KEY
# float32, where the same answer is to be expected of any layout; and replicas that share the host
# rather than take all its cores each.
export EKIDEN_PREFILL_OPTIONS="-tp 2 --dtype float32 --threads-per-rank 1"
export EKIDEN_DECODE_OPTIONS="-tp 1 --dtype float32 --threads-per-rank 1"

# Longer than what a decode replica prefills by itself.
QUESTION='A friend and I are planning a long journey through Europe by train. We will start in
Lisbon, go on to Madrid and Barcelona, and then spend some days in the capital of France before we
travel to Brussels, Amsterdam and Berlin. What is the capital of France called?'
ANSWER=Paris
work=$(mktemp -d)

log() { printf '\n== %s (%ss)\n' "$*" "$SECONDS"; }
fail() {
  printf 'FAILED: %s\n' "$*" >&2
  exit 1
}

# show: a command and what it says; quietly: a command alone, whose words count only if it fails.
show() {
  printf '$ %s\n' "$*"
  "$@"
}
quietly() {
  printf '$ %s\n' "$*"
  "$@" >"$work/said" 2>&1 || fail "$(cat "$work/said")"
}

finish() {
  local code=$?
  if [ "$code" -ne 0 ]; then
    docker compose ps -a || true
    docker compose logs --tail 30 || true
  fi
  # shellcheck disable=SC2046
  kill $(jobs -p) 2>/dev/null || true
  docker compose down --volumes --timeout 5 >/dev/null 2>&1 || true
  docker image rm "ekiden-worker:$EKIDEN_TAG" "ekiden-gateway:$EKIDEN_TAG" >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap finish EXIT

# within SECONDS WHAT COMMAND...: try until it succeeds; failing it by then fails the test.
within() {
  local until=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$until" ] || fail "not in time: $what"
    sleep 0.5
  done
}

url() { printf 'http://%s' "$(docker compose port gateway 8000)"; }
ready() { curl -fsS --max-time 5 "$(url)/ready"; }
says() { docker compose logs --no-log-prefix "$1" 2>&1 | grep -q "$2"; }
inside() { docker compose exec -T gateway ekiden "$@"; }

chat() {
  printf '$ docker compose exec gateway ekiden chat "%s"\n' "${QUESTION//$'\n'/ }"
  inside chat --url http://127.0.0.1:8000 --max-tokens 48 \
    "${QUESTION//$'\n'/ }" | tee "$work/chat"
  grep -q "$ANSWER" "$work/chat" || fail "the answer does not name $ANSWER"
}

# The text of the answer alone: what is above the account.
answer() { sed '/^$/,$d' "$work/chat"; }

# column NAME...: those columns of `ekiden audit`, one replica a line.
column() {
  inside audit | awk -v names="$*" '
    BEGIN { n = split(names, name) }
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    { for (i = 1; i <= n; i++) printf "%s%s", $(at[name[i]]), i < n ? " " : "\n" }'
}

# replicas ROLE N: whether exactly N of them are registered and answer.
replicas() { [ "$(column role | grep -c "^$1$")" -eq "$2" ]; }

# The container of the decode replica that holds a request now.
busy_decode() {
  local address container
  address=$(column role address requests | awk '$1 == "decode" && $3 > 0 { print $2 }' | head -1)
  [ -n "$address" ] || return 1
  for container in $(docker compose ps -q decode); do
    if docker inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}}:{{end}}' "$container" |
      grep -qF "${address%:*}:"; then
      printf '%s' "$container"
      return 0
    fi
  done
  return 1
}

body() {
  cat <<JSON
{"model": "${EKIDEN_MODEL:-smollm2-135m-instruct}", "stream": true, "max_tokens": $1,
 "ignore_eos": true, "messages": [{"role": "user", "content": "Tell me a very long story."}]}
JSON
}

# complete KEY MAX_TOKENS [CURL OPTION...]: a chat as any HTTP client would ask for it.
complete() {
  local key=$1 tokens=$2
  shift 2
  curl -sS -N --max-time 180 "$@" -H "Authorization: Bearer $key" \
    -H 'Content-Type: application/json' -d "$(body "$tokens")" "$(url)/v1/chat/completions"
}

# start_stream MAX_TOKENS: in the background, into $work/stream; returns once tokens come.
start_stream() {
  printf '$ curl -N %s/v1/chat/completions -d %s &\n' "$(url)" "'{... \"stream\": true}'"
  : >"$work/stream"
  complete "$EKIDEN_API_KEY" "$1" >"$work/stream" 2>"$work/curl" &
  stream=$!
  within 60 "five events" sh -c "[ \"\$(grep -c '^data:' '$work/stream')\" -ge 5 ]"
}

# end_stream PATTERN: wait for its end; one of its last two events must show the pattern.
end_stream() {
  wait "$stream" || fail "curl: $(cat "$work/curl")"
  printf '... %s events, the last two:\n' "$(grep -c '^data:' "$work/stream")"
  grep '^data:' "$work/stream" | tail -2 | tee "$work/last"
  grep -q "$1" "$work/last" || fail "the stream does not end in $1"
}

log build
quietly docker compose build
docker image ls --format '{{.Repository}} {{.Size}}' | grep -E '^ekiden-(worker|gateway) ' | sort -u

log "start everything but Redis"
quietly docker compose up -d prefill decode gateway
within 60 "the gateway says what it lacks" says gateway "cannot reach Redis"
docker compose logs --no-log-prefix gateway | grep -om1 "ekiden: cannot reach Redis.*"

log "start Redis"
quietly docker compose up -d redis
within 180 "ready" ready
within 60 "one prefill replica" replicas prefill 1
show docker compose ps --format 'table {{.Name}}\t{{.Status}}'

log "with a wrong key"
code=$(complete wrong 8 -o /dev/null -w '%{http_code}')
[ "$code" = 401 ] || fail "a chat with a wrong key gave $code, not 401"
echo "401"

log chat
chat
grep -q 'computed on prefill' "$work/chat" || fail "the prompt was not prefilled on the prefill pool"
first=$(answer)

log "a second decode replica"
quietly docker compose up -d --no-recreate --scale decode=2
within 120 "two decode replicas" replicas decode 2
show docker compose exec -T gateway ekiden audit
chat
[ "$(answer)" = "$first" ] || fail "another answer than before"

log "kill the decode replica that holds a stream"
start_stream 4000
victim=$(busy_decode) || fail "no decode replica holds the stream"
show docker kill "${victim:0:12}"
end_stream '"error"'

log "the next chat"
chat
[ "$(answer)" = "$first" ] || fail "another answer than before"
within 15 "the dead replica leaves the registry" replicas decode 1
show docker compose exec -T gateway ekiden audit --idle --wait 20

log "stop in mid-stream"
start_stream 60
kill -0 "$stream" || fail "the stream ended before the stop"
quietly docker compose stop
end_stream '\[DONE\]'
for container in $(docker compose ps -aq); do
  [ "$container" != "$victim" ] || continue
  state=$(docker inspect -f '{{.Name}} {{.State.ExitCode}}' "$container")
  echo "$state"
  [ "${state##* }" = 0 ] || fail "a service did not end cleanly: $state"
done
log "all held"
