"""Tokenizers of both decoder kinds."""

from __future__ import annotations

import pytest
from tiny_tokenizers import byte_fallback, byte_level, write

from ekiden.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    directory = tmp_path_factory.mktemp(request.param.__name__)
    return Tokenizer.load(write(directory, request.param()))


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("bytes"), byte_level()))


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("fallback"), byte_fallback()))
