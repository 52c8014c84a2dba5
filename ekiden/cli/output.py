"""How data is printed, and what becomes of the output when its reader has left."""

from __future__ import annotations

import os
import sys

import msgspec


def as_json(data: object) -> str:
    """Indented, with the fields of structs by name."""
    return msgspec.json.format(msgspec.json.encode(data)).decode()


def leave_output() -> None:
    """Send what is still to be printed nowhere: at exit Python would try once more, and complain.

    Call it after a BrokenPipeError, which ``ekiden ... | head`` gives.
    """
    with open(os.devnull, "w") as nobody:
        os.dup2(nobody.fileno(), sys.stdout.fileno())
