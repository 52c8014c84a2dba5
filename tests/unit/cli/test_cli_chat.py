"""The chat client against a real HTTP server: streams, accounts, and every way to break off."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ekiden.cli.account import account_table
from ekiden.cli.chat import server_events
from ekiden.cli.main import main

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 2,
    "ekiden": {
        "sources": {
            "decode_cache": 0,
            "prefill_cache": 16,
            "prefill_computed": 84,
            "local_computed": 0,
            "reason": "prefilled on prefill-0",
        },
        "times": {
            "queue_s": 0.001,
            "prefill_s": 0.1,
            "transfer_s": 0.002,
            "first_decode_s": 0.01,
            "decode_s": 0.02,
        },
        "transfer": {
            "bytes": 2_000_000,
            "seconds": 0.004,
            "wire": "ucx tcp",
            "fetched_tokens": 48,
            "fetched_bytes": 1_000_000,
        },
        "fallbacks": [{"kind": "prefill_retry", "reason": "prefill-1 is gone"}],
        "prefill_replica": "prefill-0",
        "decode_replica": "decode-0",
    },
}


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def stream(*events: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


Serve = Callable[[int, bytes], str]


@pytest.fixture
def gateway() -> Iterator[tuple[Serve, list[dict[str, Any]]]]:
    """(serve(status, body) -> url, the bodies of chat requests that arrived)."""
    answer: list[tuple[int, bytes]] = []
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, json.dumps({"data": [{"id": "m-1"}]}).encode())

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._reply(*answer[0])

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def serve(status: int, body: bytes) -> str:
        answer[:] = [(status, body)]
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield serve, asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_is_streamed_and_accounted_for(gateway, capsys):
    serve, asked = gateway
    url = serve(200, stream(piece("A "), piece("sash ☃."), {"choices": [], "usage": USAGE}))
    assert main(["chat", "What?", "--url", url, "--max-tokens", "7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("A sash ☃.\n")
    assert account_table(USAGE) in out
    assert asked[0]["model"] == "m-1"
    assert asked[0]["max_tokens"] == 7
    assert asked[0]["messages"] == [{"role": "user", "content": "What?"}]
    assert asked[0]["stream_options"] == {"include_usage": True}


def test_a_stream_without_its_end_is_an_error(gateway, capsys):
    url = gateway[0](200, stream(piece("A "), done=False))
    assert main(["chat", "What?", "--url", url]) == 1
    assert "broke off" in capsys.readouterr().err


def test_an_error_event_in_mid_stream_is_an_error(gateway, capsys):
    url = gateway[0](200, stream(piece("A "), {"error": {"message": "decode-0 died"}}))
    assert main(["chat", "What?", "--url", url]) == 1
    assert "decode-0 died" in capsys.readouterr().err


def test_a_refusal_shows_status_and_message(gateway, capsys):
    url = gateway[0](400, json.dumps({"error": {"message": "prompt too long: 9 > 8"}}).encode())
    assert main(["chat", "What?", "--url", url]) == 1
    assert capsys.readouterr().err == "ekiden: HTTP 400: prompt too long: 9 > 8\n"


def test_the_table_shows_sources_times_bytes_and_wire():
    rows = dict(line.strip().split("  ", 1) for line in account_table(USAGE).splitlines())
    shown = {label: value.strip() for label, value in rows.items()}
    assert shown["prompt tokens"] == "100"
    assert shown["prefill cache"] == "16"
    assert shown["computed on prefill"] == "84"
    assert "computed on decode" not in shown
    assert shown["time"] == "133.0 ms"
    assert shown["transfer (exposed)"] == "2.0 ms"
    assert shown["KV moved"] == "2.00 MB, 4.0 ms from first to last byte"
    assert shown["wire"] == "ucx tcp"
    assert shown["KV lent to prefill"] == "1.00 MB, 48 tokens that decode held"
    assert shown["fallback"] == "prefill_retry: prefill-1 is gone"


def test_the_table_of_another_server_has_only_the_counts():
    table = account_table({"prompt_tokens": 3, "completion_tokens": 1})
    assert table.splitlines() == ["prompt tokens  3", "output tokens  1"]


def test_events_may_span_lines_and_comments_are_skipped():
    lines = iter([": ping", "", 'data: {"a":', "data: 1}", "", "data: [DONE]", ""])
    assert list(server_events(lines)) == [{"a": 1}]
