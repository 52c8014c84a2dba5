"""Results that one command writes as JSON and others read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ekiden.core.errors import SetupError

Kind = TypeVar("Kind")


def read_result(path: Path, kinds: Mapping[str, type[Kind]], writers: str) -> Kind:
    """The result in a file, as the kind that its ``schema`` names. ``writers``: what writes such.

    Raises:
        SetupError: it cannot be read, is no result, or is one of another schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from None
    try:
        found = msgspec.json.decode(data, type=_Head).schema
        if found not in kinds:
            known = " and ".join(map(repr, kinds))
            raise SetupError(f"{path} has the schema {found!r}; this version reads {known}")
        return msgspec.json.decode(data, type=kinds[found])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(
            f"{path} is no result of {writers} ({error}): name a file that it wrote"
        ) from None


class _Head(msgspec.Struct):
    schema: str
