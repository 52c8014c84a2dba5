"""Services that do nothing, for tests of ``ekiden up``: they get ready, drain, and can misbehave.

    standin.py up RUN_DIR [--misbehave NAME=WAY]...   a whole deployment of them
    standin.py NAME READY_FILE WAY                    one of them

Ways: well, ``die-at-start``, ``never-ready``, ``deaf`` (to SIGTERM).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

GRACE_S, DEAF_GRACE_S = 20.0, 1.0
NAMES = ("prefill-0", "decode-0", "gateway")


def serve(name: str, ready_file: Path, way: str) -> int:
    print(f"{name} begins with pid {os.getpid()}", flush=True)
    # Blocked, and waited for below. An event set by a handler can deadlock: the handler may run
    # while the main thread holds the event's lock.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if way == "die-at-start":
        print(f"ekiden: {name} has no model", file=sys.stderr)
        return 2
    address = listen() if name == "gateway" else "127.0.0.1:1"
    if way != "never-ready":
        partial = ready_file.with_suffix(".partial")
        partial.write_text(json.dumps({"address": address}))
        partial.rename(ready_file)
    while True:
        signal.sigwait({signal.SIGTERM})
        if way != "deaf":
            break
    print(f"{name} drained", flush=True)
    return 0


class Gateway(BaseHTTPRequestHandler):
    """Ready, serves the model ``m`` and answers every question alike."""

    def do_GET(self) -> None:
        body = {"data": [{"id": "m"}]} if self.path == "/v1/models" else {}
        self.reply(json.dumps(body).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = {"choices": [{"index": 0, "delta": {"content": "A sash."}}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        events = [json.dumps(answer), json.dumps(usage), "[DONE]"]
        self.reply("".join(f"data: {event}\n\n" for event in events).encode())

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def listen() -> str:
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}"


def up(argv: Sequence[str]) -> int:
    """The real ``Up`` over stand-ins."""
    import msgspec

    from ekiden.cli.deployment import Deployment
    from ekiden.cli.main import build_parser
    from ekiden.cli.up import Up, deployment
    from ekiden.service.supervisor import ChildSpec

    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--misbehave", action="append", default=[])
    ours, rest = parser.parse_known_args(argv)
    ways = dict(pair.split("=") for pair in ours.misbehave)

    def replaced(spec: ChildSpec) -> ChildSpec:
        ready = ours.run_dir / f"{spec.name}.ready"
        way = ways.get(spec.name, "well")
        argv = (sys.executable, __file__, spec.name, str(ready), way)
        grace_s = DEAF_GRACE_S if way == "deaf" else GRACE_S
        return msgspec.structs.replace(spec, argv=argv, grace_s=grace_s)

    class StandIns(Deployment, frozen=True, kw_only=True):
        def workers(self, run_dir: Path, redis_url: str) -> list[ChildSpec]:
            return [replaced(spec) for spec in super().workers(run_dir, redis_url)]

        def gateway(self, run_dir: Path, redis_url: str) -> ChildSpec:
            return replaced(super().gateway(run_dir, redis_url))

    args = build_parser().parse_args(["up", "--port", "0", *rest])
    plan = StandIns(**msgspec.structs.asdict(deployment(args, ours.run_dir)))
    return asyncio.run(Up(plan, args, ours.run_dir).run())


if __name__ == "__main__":
    if sys.argv[1] == "up":
        sys.exit(up(sys.argv[2:]))
    sys.exit(serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
