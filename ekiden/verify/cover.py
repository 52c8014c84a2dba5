"""Which cells of the full grid are run with real processes, and in which order.

A generator of pairwise covers chooses cells one by one, but here whole replicas are chosen: a
started replica costs seconds, a cell of running ones little. So the cells are tiles, a few prefill
replicas times a list of decode replicas, and a tile's decode replicas are picked greedily by how
many uncovered combinations they add.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from .layouts import Axes, Layout, Pair

Combination = tuple[object, ...]


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """Every prefill replica of it, all alive at once, meets every decode replica, in turns."""

    prefill: tuple[Layout, ...]
    decode: tuple[Layout, ...]

    def cells(self) -> list[Pair]:
        return [(prefill, decode) for decode in self.decode for prefill in self.prefill]


def cover(axes: Axes, decodes: int = 12) -> list[Tile]:
    """A tile for each KV dtype of prefill, with at least ``decodes`` decode replicas.

    No layout is in two tiles on the same side, so each replica starts once. Together the tiles
    have every pair of TP x PP, between equal KV dtypes even, and every two values of any two axes.
    """
    groups = [prefill_group(axes, number) for number in range(len(axes.kv))]
    left = set(axes.layouts())
    missing = wanted(axes)
    picked: list[list[Layout]] = [[] for _ in groups]
    while missing or min(map(len, picked)) < decodes:
        number = min(range(len(groups)), key=lambda n: len(picked[n]))
        best = max(sorted(left), key=lambda d: _gain(groups[number], d, missing))
        left.discard(best)
        picked[number].append(best)
        missing -= combinations_of((prefill, best) for prefill in groups[number])
    return [
        Tile(prefill=group, decode=tuple(decode))
        for group, decode in zip(groups, picked, strict=True)
    ]


def prefill_group(axes: Axes, number: int) -> tuple[Layout, ...]:
    """The prefill replicas of one KV dtype: every TP once, the other axes turned by ``number``,
    so that over all groups every two values of them meet."""
    return tuple(
        Layout(
            tp=tp,
            pp=axes.pp[(index + number) % len(axes.pp)],
            block_size=axes.block_size[(index + number) % len(axes.block_size)],
            kv=axes.kv[number],
        )
        for index, tp in enumerate(axes.tp)
    )


def combinations_of(cells: Iterable[Pair]) -> set[Combination]:
    """What these cells cover of ``wanted``."""
    found: set[Combination] = set()
    for prefill, decode in cells:
        found |= set(itertools.combinations(_named(prefill, decode), 2))
        if prefill.kv == decode.kv:
            found.add((prefill.tp, prefill.pp, decode.tp, decode.pp))
    return found


def wanted(axes: Axes) -> set[Combination]:
    """Every two values of any two axes of the two sides, and every pair of TP x PP."""
    names = [(side, axis) for side in ("prefill", "decode") for axis in Layout.__struct_fields__]
    found: set[Combination] = set()
    for one, other in itertools.combinations(names, 2):
        values = itertools.product(_values(axes, one[1]), _values(axes, other[1]))
        found |= {((one, a), (other, b)) for a, b in values}
    splits = list(itertools.product(axes.tp, axes.pp))
    return found | {(*p, *d) for p, d in itertools.product(splits, splits)}


def _gain(group: Sequence[Layout], decode: Layout, missing: set[Combination]) -> int:
    return len(combinations_of((prefill, decode) for prefill in group) & missing)


def _values(axes: Axes, axis: str) -> tuple[object, ...]:
    return tuple(getattr(axes, axis))


def _named(prefill: Layout, decode: Layout) -> list[Combination]:
    sides = (("prefill", prefill), ("decode", decode))
    return [
        ((side, axis), getattr(layout, axis))
        for side, layout in sides
        for axis in Layout.__struct_fields__
    ]
