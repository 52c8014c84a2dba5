"""How replicas are split, and the grids: which prefill layouts meet which decode layouts."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

import msgspec

from ekiden.core.config import KV_CACHE_DTYPES
from ekiden.core.errors import SetupError

_FORMS = "write TP2, PP2, TP2xPP2, TP1/32 (blocks of 32 tokens) or TP1:int8 (the KV's dtype)"


class Layout(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """How one replica is split. Written ``TP2``, ``PP2`` or ``TP2xPP2``, with ``/32`` for blocks
    of another size than the default and ``:int8`` for KV of another dtype than the run's."""

    tp: int = 1
    pp: int = 1
    block_size: int = 16
    kv: str = ""
    """A value of ``--kv-cache-dtype``; empty: that of the run."""

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"] if self.tp > 1 or self.pp == 1 else []
        if self.pp > 1:
            parts.append(f"PP{self.pp}")
        block = "" if self.block_size == 16 else f"/{self.block_size}"
        return "x".join(parts) + block + (f":{self.kv}" if self.kv else "")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read what ``str`` writes.

        Raises:
            SetupError: the text is no layout.
        """
        pattern = r"(?:TP(\d+))?x?(?:PP(\d+))?(?:/(\d+))?(?::(\w+))?"
        match = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
        if match is None or not any(match.groups()[:2]):
            raise SetupError(f"layout {text!r} is not understood: {_FORMS}")
        tp, pp, block = (int(group) if group else None for group in match.groups()[:3])
        kv = (match[4] or "").lower()
        if kv and kv not in KV_CACHE_DTYPES:
            raise SetupError(
                f"layout {text!r} has the KV dtype {kv}: choose {', '.join(KV_CACHE_DTYPES)}"
            )
        return cls(tp=tp or 1, pp=pp or 1, block_size=block or 16, kv=kv)


Pair = tuple[Layout, Layout]
"""(prefill, decode)."""


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """What one side of a pair may be: every combination of these."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    block_size: tuple[int, ...]
    kv: tuple[str, ...]

    def layouts(self) -> tuple[Layout, ...]:
        return tuple(
            Layout(tp=tp, pp=pp, block_size=size, kv=kv)
            for kv, size, pp, tp in itertools.product(self.kv, self.block_size, self.pp, self.tp)
        )


FULL = Axes(
    tp=(1, 2, 3, 4),
    pp=(1, 2),
    block_size=(16, 32, 48),
    kv=("float32", "bfloat16", "int8", "fp8_e4m3"),
)
"""Of the full grid: even and uneven splits, replicated heads, blocks that do not divide."""


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Every prefill layout is tried against every decode layout."""

    prefill: tuple[Layout, ...]
    decode: tuple[Layout, ...]

    def cells(self) -> list[Pair]:
        """(prefill, decode) pairs, one decode layout after the other."""
        return [(prefill, decode) for decode in self.decode for prefill in self.prefill]


def _parse_all(text: str) -> tuple[Layout, ...]:
    return tuple(Layout.parse(item) for item in text.split())


GRIDS = {
    "small": Grid(
        prefill=_parse_all("TP1 TP2 TP3 PP2 TP2xPP2"),
        decode=_parse_all("TP1 TP2 TP3 PP2"),
    ),
    "full": Grid(prefill=FULL.layouts(), decode=FULL.layouts()),
}


def sample(cells: Sequence[Pair], count: int, seed: int) -> list[Pair]:
    """``count`` of the cells, drawn by ``seed``, in the order they had; 0 or too many: all.

    As near to a square as it goes, for opening a replica costs more than a cell: N cells need
    about 2 * sqrt(N) replicas.
    """
    if not 0 < count < len(cells):
        return list(cells)
    draw = random.Random(seed)
    drawn = {
        (side, layout): draw.random()
        for side in (0, 1)
        for layout in sorted({cell[side] for cell in cells})
    }
    outer = sorted(cells, key=lambda cell: max(drawn[side, cell[side]] for side in (0, 1)))
    chosen = set(outer[:count])
    return [cell for cell in cells if cell in chosen]
