"""A GGUF file as it lies on disk: its key-value part and its tensors, by the package ``gguf``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ekiden.core.errors import SetupError


def open_gguf(source: Path) -> Any:
    """The package's reader; SetupError where the package or the file is missing or broken."""
    try:
        import gguf
    except ImportError as error:
        raise SetupError("reading GGUF needs the package gguf: install ekiden[models]") from error
    if not source.is_file():
        raise SetupError(f"GGUF file {source} does not exist")
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise SetupError(f"{source} is not a whole GGUF file: {error}") from error


class Metadata:
    """The key-value part of a GGUF file; a missing required key is a SetupError that names it."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        if key not in self._fields:
            raise SetupError(f"the GGUF file has no field {key!r}; it cannot be imported")
        return self.get(key)
