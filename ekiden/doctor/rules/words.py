"""How rules show figures."""

from __future__ import annotations

from collections.abc import Iterable


def time(seconds: float) -> str:
    """``12.3 ms``, or ``1.23 s`` from a second on."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def size(count: float) -> str:
    """``1.5 MB``: decimal, as networks are sold."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def share(part: float) -> str:
    return f"{part:.0%}"


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)
