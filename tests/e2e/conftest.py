"""One tiny model for all end-to-end tests."""

from __future__ import annotations

import pytest
from stack import TinyModel, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory = tmp_path_factory.mktemp("tiny-model")
    return TinyModel(directory=directory, reference=save_tiny_model(directory))
