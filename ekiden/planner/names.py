"""What is said of a name that a table does not have."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from ekiden.core.errors import SetupError


def nearest(wanted: str, names: Mapping[str, str]) -> str:
    """Up to three of ``names`` (as compared: as shown) that look like ``wanted``, with commas
    between."""
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.0)
    return ", ".join(dict.fromkeys(names[found] for found in close))


def unknown(
    kind: str, name: str, choices: Collection[str], wanted: str | None = None
) -> SetupError:
    """The error that names every choice; ``wanted``: the name as it is compared with them."""
    close = difflib.get_close_matches(name if wanted is None else wanted, choices, n=1)
    hint = f"nearest is {close[0]}; " if close else ""
    return SetupError(f"{kind} {name!r} is not known: {hint}choose one of {', '.join(choices)}")
