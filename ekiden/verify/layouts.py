"""The grid: which prefill and decode layouts are tried against one another."""

from __future__ import annotations

import re

import msgspec

from ekiden.core.errors import SetupError


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica is split. Written ``TP2``, ``PP2`` or ``TP2xPP2``, with ``/32`` for blocks
    of another size than the default."""

    tp: int = 1
    pp: int = 1
    block_size: int = 16

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"] if self.tp > 1 or self.pp == 1 else []
        if self.pp > 1:
            parts.append(f"PP{self.pp}")
        suffix = "" if self.block_size == 16 else f"/{self.block_size}"
        return "x".join(parts) + suffix

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read what ``str`` writes.

        Raises:
            SetupError: the text is no layout.
        """
        match = re.fullmatch(r"(?:TP(\d+))?x?(?:PP(\d+))?(?:/(\d+))?", text.strip(), re.IGNORECASE)
        if match is None or not any(match.groups()[:2]):
            raise SetupError(
                f"layout {text!r} is not understood: write TP2, PP2, TP2xPP2 or TP1/32"
            )
        tp, pp, block = (int(group) if group else None for group in match.groups())
        return cls(tp=tp or 1, pp=pp or 1, block_size=block or 16)


def _parse_all(text: str) -> tuple[Layout, ...]:
    return tuple(Layout.parse(item) for item in text.split())


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Every prefill layout is tried against every decode layout."""

    prefill: tuple[Layout, ...]
    decode: tuple[Layout, ...]

    def cells(self) -> list[tuple[Layout, Layout]]:
        """(prefill, decode) pairs, one decode layout after the other."""
        return [(prefill, decode) for decode in self.decode for prefill in self.prefill]


GRIDS = {
    "small": Grid(
        prefill=_parse_all("TP1 TP2 TP3 PP2 TP2xPP2"),
        decode=_parse_all("TP1 TP2 TP3 PP2"),
    ),
    "full": Grid(
        prefill=_parse_all("TP1 TP2 TP3 TP4 PP2 PP3 TP2xPP2 TP1/32 TP2/32"),
        decode=_parse_all("TP1 TP2 TP3 TP4 PP2 PP3 TP2xPP2 TP1/32 TP2/32"),
    ),
}
