"""A JSON object that knows its file, for errors that name both. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError


class Fields:
    """The fields of one file; a missing one is looked up among ``defaults``."""

    def __init__(
        self, values: dict[str, Any], file: Path, defaults: dict[str, Any] | None = None
    ) -> None:
        self.values = {**(defaults or {}), **values}
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number above zero; a missing or null field takes ``default``."""
        value = self.values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SetupError(f"{self.file}: {name} is {value!r}: it must be a whole number above 0")
        return value

    def number(self, name: str) -> float:
        """A number above zero."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise SetupError(f"{self.file}: {name} is {value!r}: it must be a number above 0")
        return float(value)


def read_json(file: Path) -> dict[str, Any]:
    """Raises SetupError: no such file, or a broken one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise SetupError(f"{file} does not exist: is this a model directory?") from None
    except (OSError, msgspec.DecodeError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from None
