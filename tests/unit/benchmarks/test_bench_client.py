"""The benches' client: every token at its moment, every failure an error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest
from benchmarks.client import Client, client

USAGE = {"completion_tokens": 2, "ekiden": {"times": {"decode_s": 0.0}}}


def event(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text}], 'usage': None})}\n\n".encode()


END = f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\ndata: [DONE]\n\n".encode()


class Gateway(NamedTuple):
    """A server, a client of it, and what came to the server."""

    client: Client
    asked: list[dict[str, object]]
    ports: set[int]


@contextmanager
def gateway(pieces: list[bytes], status: int = 200, whole: bool = True) -> Iterator[Gateway]:
    """It answers with ``pieces``, a chunk each; without ``whole`` it hangs up after them."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "m"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            ports.add(self.client_address[1])
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in pieces:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            if whole:
                self.wfile.write(b"0\r\n\r\n")
            else:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    asked: list[dict[str, object]] = []
    ports: set[int] = set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with client(f"http://127.0.0.1:{server.server_address[1]}") as made:
            yield Gateway(made, asked, ports)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_stream_is_timed_event_by_event():
    with gateway([event("a"), event("b"), END]) as it:
        sample = it.client.ask([1, 2, 3], 2)
    assert (sample.tokens, len(sample.gaps)) == (2, 1)
    assert 0 < sample.ttft <= sample.ttft + sample.gaps[0] <= sample.total
    sent = it.asked[0]
    assert (sent["model"], sent["prompt"], sent["max_tokens"]) == ("m", [1, 2, 3], 2)


def test_events_may_be_cut_anywhere():
    text = event("a") + event("b") + END
    with gateway([text[i : i + 7] for i in range(0, len(text), 7)]) as it:
        assert it.client.ask([1], 2).tokens == 2


def test_a_connection_is_used_again():
    with gateway([event("a"), END]) as it:
        for _ in range(3):
            it.client.ask([1], 1)
        assert (len(it.asked), len(it.ports)) == (3, 1)


def test_a_refusal_is_an_error_with_its_text():
    with (
        gateway([b"no such model"], status=404) as it,
        pytest.raises(RuntimeError, match="HTTP 404: no such model"),
    ):
        it.client.ask([1], 1)


def test_an_error_in_mid_stream_is_an_error():
    broken = b'data: {"error": {"code": "replica_failed"}}\n\n'
    with gateway([event("a"), broken]) as it, pytest.raises(RuntimeError, match="replica_failed"):
        it.client.ask([1], 1)


def test_a_gateway_that_hangs_up_is_an_error():
    with gateway([event("a")], whole=False) as it, pytest.raises(ConnectionError, match="hung up"):
        it.client.ask([1], 1)
