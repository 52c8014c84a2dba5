"""Who owns which heads, rows and layers. Pure arithmetic, no torch: one rule for everybody."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from ekiden.core.errors import SetupError


class HeadShare(msgspec.Struct, frozen=True, kw_only=True):
    """One TP rank's heads: global query heads [q_start, q_stop), KV heads [kv_start, kv_stop)."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def num_q(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_kv(self) -> int:
        return self.kv_stop - self.kv_start


def even_split(total: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """[start, stop) of each part; the first parts take one more where it does not divide.

    Whole multiples of ``unit`` are dealt where these divide ``total`` and suffice for all.
    """
    if total % unit or total // unit < parts:
        unit = 1
    base, extra = divmod(total // unit, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + unit * (base + (part < extra)))
    return list(itertools.pairwise(bounds))


def even_part(total: int, parts: int, index: int) -> int:
    """The length of part ``index`` of ``even_split(total, parts)``."""
    base, extra = divmod(total, parts)
    return base + (index < extra)


def balanced_split(costs: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """[start, stop) of each of ``parts`` contiguous, non-empty parts of ``costs``.

    The dearest part is as cheap as any contiguous split can make it (the linear partition
    problem, by dynamic programming); among those splits the most even one is taken, and the first
    parts are the longer where that does not matter. The same costs always give the same split.

    Raises:
        ValueError: more parts than costs, or none.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} costs cannot be split into {parts} parts")
    dearest, _ = _cheapest(costs, parts, max)

    def spread(part: int, rest: float) -> float:
        return part * part + rest if part <= dearest else math.inf

    return _cheapest(costs, parts, spread)[1]


def _cheapest(
    costs: Sequence[int], parts: int, join: Callable[[int, float], float]
) -> tuple[float, list[tuple[int, int]]]:
    """The least ``join(first part's cost, value of the rest)`` over all splits, and its split."""
    total, n = [0, *itertools.accumulate(costs)], len(costs)
    values: list[float] = [0.0 if start == n else math.inf for start in range(n + 1)]
    cuts: list[list[int]] = []
    for _ in range(parts):
        rest, values = values, [math.inf] * (n + 1)
        cuts.append([n] * (n + 1))
        for start in range(n):
            for stop in range(n, start, -1):
                value = join(total[stop] - total[start], rest[stop])
                if value < values[start]:
                    values[start], cuts[-1][start] = value, stop
    bounds = [0]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return values[0], list(itertools.pairwise(bounds))


def head_split(num_heads: int, num_kv_heads: int, tp: int) -> list[HeadShare]:
    """Deal heads to ``tp`` ranks.

    With tp <= KV heads, whole groups (a KV head with its query heads) are dealt in order. With
    tp > KV heads, ranks are dealt to groups the same way: a group's query heads are split over
    its ranks and its KV head is replicated on them. No rank straddles groups.

    Raises:
        SetupError: query heads are not a multiple of KV heads, or tp passes the query heads of
            some group.
    """
    return [*_head_split(num_heads, num_kv_heads, tp)]


@lru_cache(maxsize=256)
def _head_split(num_heads: int, num_kv_heads: int, tp: int) -> tuple[HeadShare, ...]:
    if num_heads % num_kv_heads:
        raise SetupError(
            f"num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}: the model's config.json is broken"
        )
    group = num_heads // num_kv_heads
    if tp > num_heads:
        raise SetupError(
            f"--tensor-parallel-size {tp} is more than the model's {num_heads} query heads: "
            f"choose 1 to {num_heads}"
        )
    if tp <= num_kv_heads:
        return tuple(
            HeadShare(q_start=a * group, q_stop=b * group, kv_start=a, kv_stop=b)
            for a, b in even_split(num_kv_heads, tp)
        )
    shares: list[HeadShare] = []
    for kv_head, (first, last) in enumerate(even_split(tp, num_kv_heads)):
        for a, b in even_split(group, last - first):
            start = kv_head * group
            shares.append(
                HeadShare(
                    q_start=start + a, q_stop=start + b, kv_start=kv_head, kv_stop=kv_head + 1
                )
            )
    return tuple(shares)
