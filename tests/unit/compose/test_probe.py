"""The containers' health check tells a service that answers from one that does not."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

import pytest
from compose_files import COMPOSE, load_script

from ekiden.rpc.server import RpcServer

probe = load_script("probe")


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.fixture
async def rpc_server() -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1", 0, secret="hush")
    await server.start(())
    yield server
    await server.stop(0)


class _Handler(BaseHTTPRequestHandler):
    """200 on /ready, 204 on /empty, 503 on everything else."""

    def do_GET(self) -> None:
        self.send_response({"/ready": 200, "/empty": 204}.get(self.path, 503))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is its result."""


@pytest.fixture
def http_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_redis_is_healthy_when_it_answers(redis_url: str) -> None:
    assert probe.main(["redis", urlsplit(redis_url).netloc]) == 0


def test_redis_is_not_healthy_when_nothing_listens(
    closed_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe.main(["redis", f"127.0.0.1:{closed_port}"]) == 1
    assert "refused" in capsys.readouterr().out


def test_something_that_is_not_redis_is_not_healthy(http_url: str) -> None:
    assert probe.main(["redis", urlsplit(http_url).netloc]) == 1


def test_http_is_healthy_only_with_200(http_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(["http", f"{http_url}/ready"]) == 0
    assert probe.main(["http", f"{http_url}/empty"]) == 1
    assert probe.main(["http", f"{http_url}/health"]) == 1
    assert "503" in capsys.readouterr().out


def test_http_is_not_healthy_when_nothing_listens(closed_port: int) -> None:
    assert probe.main(["http", f"http://127.0.0.1:{closed_port}/ready"]) == 1


async def test_grpc_health_follows_what_the_server_says_without_a_secret(
    rpc_server: RpcServer, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"127.0.0.1:{rpc_server.port}"
    assert await asyncio.to_thread(probe.main, ["grpc", target]) == 0
    await rpc_server.set_serving(False)
    assert await asyncio.to_thread(probe.main, ["grpc", target]) == 1
    assert "NOT_SERVING" in capsys.readouterr().out


def test_grpc_is_not_healthy_when_nothing_listens(closed_port: int) -> None:
    assert probe.main(["grpc", f"127.0.0.1:{closed_port}"]) == 1


@pytest.mark.parametrize("argv", [[], ["grpc"], ["ftp", "x"], ["http", "x", "y"]])
def test_bad_usage_is_not_healthy_and_shows_the_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe.main(argv) == 1
    assert "probe grpc HOST:PORT" in capsys.readouterr().err


def test_a_probe_of_redis_does_not_pay_for_grpc(closed_port: int) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['probe', 'redis', '127.0.0.1:{closed_port}']\n"
        f"try: runpy.run_path({str(COMPOSE / 'probe.py')!r}, run_name='__main__')\n"
        "except SystemExit: print('grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
