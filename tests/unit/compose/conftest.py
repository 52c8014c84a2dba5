"""The compose files as data."""

from __future__ import annotations

import pytest
import yaml
from compose_files import COMPOSE, Document, with_defaults


@pytest.fixture(scope="session")
def compose_text() -> str:
    return (COMPOSE / "compose.yaml").read_text()


@pytest.fixture(scope="session")
def compose(compose_text: str) -> Document:
    """compose.yaml with YAML's merges done and every variable at its default."""
    document: Document = with_defaults(yaml.safe_load(compose_text))
    return document


@pytest.fixture(scope="session")
def dockerfile() -> str:
    return (COMPOSE / "Dockerfile").read_text()
