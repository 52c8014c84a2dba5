"""The file by which a service tells its supervisor that it serves, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError


def write_ready_file(path: str, fields: dict[str, Any]) -> None:
    """Write ``fields`` as JSON, whole or not at all; an empty ``path`` asks for no file.

    Raises:
        SetupError: it cannot be written.
    """
    if not path:
        return
    target = Path(path)
    partial = target.with_suffix(".partial")
    try:
        partial.write_bytes(msgspec.json.encode(fields))
        partial.rename(target)
    except OSError as error:
        raise SetupError(f"--ready-file {path} cannot be written: {error.strerror}") from None
