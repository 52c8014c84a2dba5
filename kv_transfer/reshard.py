"""Which rank sends which heads, layers and positions to which rank. Pure arithmetic, no torch.

Two replicas may split the same model differently (TP, PP, replicated heads, block sizes). Every
rank holds one rectangle of (heads x layers), so what a source rank and a target rank share is
again one rectangle: a ``Pair``. A session moves the positions [start, end) of one prompt, cut
into segments; a segment of a pair is one message. Both sides work the same list out on their own,
so a message needs no description of its contents.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.core.errors import SetupError

MESSAGE_BYTES = 4 << 20
"""Payload a message should not pass: large enough for full speed, small enough to stay in the
processor's cache between the gather and the wire, and to overlap with the next chunk."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What rank ``source`` of prefill sends to rank ``target`` of decode; global indices."""

    source: int
    target: int
    head_start: int
    head_stop: int
    layer_start: int
    layer_stop: int

    def local(self, rank: RankLayout) -> tuple[slice, slice]:
        """(heads, layers) of the pair as slices of ``rank``'s own cache."""
        return (
            slice(self.head_start - rank.head_start, self.head_stop - rank.head_start),
            slice(self.layer_start - rank.layer_start, self.layer_stop - rank.layer_start),
        )

    def token_bytes(self, layout: KvLayout) -> int:
        """Bytes of one position of this pair."""
        rows = (self.head_stop - self.head_start) * (self.layer_stop - self.layer_start) * 2
        return rows * layout.row_bytes


class Run(msgspec.Struct, frozen=True, array_like=True):
    """``count`` units of ``tokens`` positions each, the first at ``position``."""

    position: int
    tokens: int
    count: int


def check_layout(layout: KvLayout) -> None:
    """Every (head, layer) is held by someone, and heads are dealt in whole disjoint ranges.

    Raises:
        SetupError: a head or a layer of the model is on no rank, or head ranges overlap in part.
    """
    for layer in range(layout.num_layers):
        ranges = {_holding(r) for r in layout.ranks if r.layer_start <= layer < r.layer_stop}
        heads = [head for start, stop, _, _ in sorted(ranges) for head in range(start, stop)]
        if heads != list(range(layout.num_kv_heads)):
            raise SetupError(
                f"the KV layout (tp={layout.tp}, pp={layout.pp}) gives layer {layer} the KV heads "
                f"{heads}, but the model has heads 0 to {layout.num_kv_heads - 1}"
            )


def pairs(source: KvLayout, target: KvLayout) -> list[Pair]:
    """The pairs of a hand-off, in order of (target, source).

    Every element of every target rank is in exactly one pair. Where ranks of the source are
    replicas (they name the same heads and layers), the targets that need these heads take turns
    over them, so that the load spreads.
    """
    found: list[Pair] = []
    for target_rank, wanted in enumerate(target.ranks):
        for replicas in _replica_groups(source):
            held = source.ranks[replicas[0]]
            if (shared := _overlap(held, wanted)) is not None:
                turn = _turn(target, target_rank)
                found.append(
                    msgspec.structs.replace(
                        shared, source=replicas[turn % len(replicas)], target=target_rank
                    )
                )
    return sorted(found, key=lambda pair: (pair.target, pair.source))


def _replica_groups(layout: KvLayout) -> list[list[int]]:
    groups: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for rank, r in enumerate(layout.ranks):
        groups[_holding(r)].append(rank)
    return list(groups.values())


def _turn(layout: KvLayout, rank: int) -> int:
    """The place of ``rank`` among the ranks that hold exactly what it holds."""
    mine = _holding(layout.ranks[rank])
    return sum(_holding(r) == mine for r in layout.ranks[:rank])


def _holding(r: RankLayout) -> tuple[int, int, int, int]:
    return (r.head_start, r.head_stop, r.layer_start, r.layer_stop)


def _overlap(a: RankLayout, b: RankLayout) -> Pair | None:
    head_start, head_stop = max(a.head_start, b.head_start), min(a.head_stop, b.head_stop)
    layer_start, layer_stop = max(a.layer_start, b.layer_start), min(a.layer_stop, b.layer_stop)
    if head_start >= head_stop or layer_start >= layer_stop:
        return None
    return Pair(
        source=-1,
        target=-1,
        head_start=head_start,
        head_stop=head_stop,
        layer_start=layer_start,
        layer_stop=layer_stop,
    )


def unit_tokens(source: KvLayout, target: KvLayout) -> int:
    """Positions that lie together in both caches: the greatest common divisor of block sizes."""
    return math.gcd(source.block_size, target.block_size)


def segment_tokens(
    source: KvLayout, target: KvLayout, *, wanted: int, granule: int, message_bytes: int
) -> int:
    """Positions of one segment: at most ``wanted``, and few enough that no message passes
    ``message_bytes``; whole blocks of both sides where that fits, else whole granules; at least
    one granule."""
    widest = max(pair.token_bytes(source) for pair in pairs(source, target))
    limit = min(wanted, message_bytes // widest)
    step = math.lcm(source.block_size, target.block_size)
    if limit < step:
        step = granule
    return max(limit // step * step, granule)


def segments(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """[start, end) cut at the multiples of ``size``; the first and the last may be shorter."""
    if start >= end:
        return []
    cuts = [start, *range((start // size + 1) * size, end, size), end]
    return list(itertools.pairwise(cuts))


def runs(start: int, end: int, unit: int) -> Iterator[Run]:
    """Positions [start, end) as a partial unit, whole units, a partial unit; empty parts left out.

    This is the canonical order of a message: each run is ``[count, heads, layers, 2, tokens,
    row]``, one run after the other.
    """
    first = min(-(-start // unit) * unit, end)
    last = max(end // unit * unit, first)
    if start < first:
        yield Run(start, first - start, 1)
    if first < last:
        yield Run(first, unit, (last - first) // unit)
    if last < end:
        yield Run(last, end - last, 1)


def places(run: Run, blocks: Sequence[int], block_size: int) -> list[tuple[int, int]]:
    """(block, offset in the block) of each unit of ``run`` through a block table."""
    positions = range(run.position, run.position + run.tokens * run.count, run.tokens)
    return [(blocks[p // block_size], p % block_size) for p in positions]
