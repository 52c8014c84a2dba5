"""What reshard promises, as checks of any module that claims to be it, over random layouts.

Two replicas are drawn as no rule of ours would deal them: heads and layers cut anywhere, replicas,
ranks in any order. Heads and layers of a pair are checked apart from positions, since all pairs of
a hand-off share their segments and runs: an element is written once if its (head, layer) is, and
its position is.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.core.errors import SetupError
from ekiden.parallel.split import head_split

BLOCK_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 48)


class Case(NamedTuple):
    source: KvLayout
    target: KvLayout
    start: int
    end: int
    segment: int
    message_bytes: int
    seed: int


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads, layers = rng.choice([1, 1, 2, 3, 4, 5, 8]), rng.randint(1, 9)
    head_dim = rng.choice([1, 4, 64])
    source, target = (_layout(rng, kv_heads, layers, head_dim) for _ in range(2))
    end = rng.randint(1, 200)
    return Case(
        source=source,
        target=target,
        start=rng.choice([0, rng.randrange(end), rng.randrange(end), end]),
        end=end,
        segment=rng.randint(1, 130),
        message_bytes=rng.choice([1, 10_000, 200_000, 4 << 20]),
        seed=seed,
    )


def _cut(rng: random.Random, count: int, parts: int) -> list[tuple[int, int]]:
    cuts = sorted(rng.sample(range(1, count), parts - 1))
    return list(itertools.pairwise([0, *cuts, count]))


def _heads(rng: random.Random, kv_heads: int) -> list[tuple[int, int]]:
    """TP 1 to 8: as the product deals heads, or cut anywhere."""
    tp = rng.randint(1, 8)
    if rng.random() < 0.7 or tp > kv_heads:
        shares = head_split(kv_heads * rng.choice([8, 9]), kv_heads, tp)
        return [(share.kv_start, share.kv_stop) for share in shares]
    return _cut(rng, kv_heads, tp)


def _layout(rng: random.Random, kv_heads: int, layers: int, head_dim: int) -> KvLayout:
    heads = _heads(rng, kv_heads)
    stages = _cut(rng, layers, rng.randint(1, min(4, layers)))
    ranks = [
        RankLayout(
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            head_start=head_range[0],
            head_stop=head_range[1],
            layer_start=first,
            layer_stop=last,
        )
        for pp_rank, (first, last) in enumerate(stages)
        for tp_rank, head_range in enumerate(heads)
    ]
    if rng.random() < 0.3:
        rng.shuffle(ranks)
    return KvLayout(
        dtype=rng.choice(["float32", "bfloat16", "int8"]),
        block_size=rng.choice(BLOCK_SIZES),
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tp=len(heads),
        pp=len(stages),
        ranks=tuple(ranks),
    )


def elements_once(m: ModuleType, case: Case) -> None:
    """Every (head, layer) of every target rank, once, from the same one of a rank that has it."""
    written: Counter[tuple[int, int, int]] = Counter()
    for pair in m.pairs(case.source, case.target):
        there, here = case.source.ranks[pair.source], case.target.ranks[pair.target]
        from_heads, from_layers = pair.local(there)
        to_heads, to_layers = pair.local(here)
        assert 0 <= from_heads.start < from_heads.stop <= there.num_heads
        assert 0 <= from_layers.start < from_layers.stop <= there.num_layers
        assert 0 <= to_heads.start < to_heads.stop <= here.num_heads
        assert 0 <= to_layers.start < to_layers.stop <= here.num_layers
        for a, b, start, stop in (
            (from_heads, to_heads, there.head_start, here.head_start),
            (from_layers, to_layers, there.layer_start, here.layer_start),
        ):
            assert (a.start + start, a.stop + start) == (b.start + stop, b.stop + stop)
        written.update(
            (pair.target, head, layer)
            for head in range(to_heads.start, to_heads.stop)
            for layer in range(to_layers.start, to_layers.stop)
        )
    expected = {
        (rank, head, layer)
        for rank, r in enumerate(case.target.ranks)
        for head in range(r.num_heads)
        for layer in range(r.num_layers)
    }
    assert written == Counter(expected)


def in_order(m: ModuleType, case: Case) -> None:
    """Both sides list pairs alike: by target, then by source."""
    order = [(pair.target, pair.source) for pair in m.pairs(case.source, case.target)]
    assert order == sorted(order)


def in_turn(m: ModuleType, case: Case) -> None:
    """Source ranks that hold the same give to equally many of the targets that hold the same."""
    uses: dict[tuple[object, object], Counter[int]] = {}
    for pair in m.pairs(case.source, case.target):
        holding = _holding(case.source.ranks[pair.source])
        group = (holding, _holding(case.target.ranks[pair.target]))
        if group not in uses:
            replicas = [i for i, r in enumerate(case.source.ranks) if _holding(r) == holding]
            uses[group] = Counter(dict.fromkeys(replicas, 0))
        uses[group][pair.source] += 1
    assert all(max(count.values()) - min(count.values()) <= 1 for count in uses.values())


def _holding(r: RankLayout) -> tuple[int, int, int, int]:
    return (r.head_start, r.head_stop, r.layer_start, r.layer_stop)


def positions_once(m: ModuleType, case: Case) -> None:
    """Every position of [start, end), once and in order, to its own place from its own place."""
    unit = m.unit_tokens(case.source, case.target)
    tables = [_table(case.seed + i, kv.block_size, case.end) for i, kv in enumerate(case[:2])]
    moved: list[int] = []
    for first, last in m.segments(case.start, case.end, case.segment):
        assert first < last
        assert first // case.segment == (last - 1) // case.segment, "not cut on one grid"
        for run in m.runs(first, last, unit):
            assert 0 < run.tokens <= unit
            assert run.count > 0
            there, here = (
                _positions(m, run, table, kv.block_size)
                for table, kv in zip(tables, case[:2], strict=True)
            )
            assert there == here
            moved += here
    assert moved == list(range(case.start, case.end))


def _table(seed: int, block_size: int, end: int) -> list[int]:
    blocks = list(range(-(-end // block_size) + 2))
    random.Random(seed).shuffle(blocks)
    return blocks


def _positions(m: ModuleType, run: object, table: list[int], block_size: int) -> list[int]:
    """Which positions the block table says the units of a run are."""
    found: list[int] = []
    for block, offset in m.places(run, table, block_size):
        assert offset >= 0
        assert offset + run.tokens <= block_size, "a unit passes the end of its block"
        first = table.index(block) * block_size + offset
        found += range(first, first + run.tokens)
    return found


def largest_unit(m: ModuleType, case: Case) -> None:
    """As much lies together as can: few pieces, and no more runs than three."""
    sizes = (case.source.block_size, case.target.block_size)
    unit = m.unit_tokens(case.source, case.target)
    assert unit == max(u for u in range(1, 49) if all(size % u == 0 for size in sizes))
    runs = list(m.runs(case.start, case.end, unit))
    assert len(runs) <= 3
    assert all(run.tokens == unit for run in runs[1:-1])
    whole = case.end // unit - -(-case.start // unit)
    assert sum(run.count for run in runs if run.tokens == unit) == max(whole, 0)


def messages_fit(m: ModuleType, case: Case) -> None:
    """A segment is the longest, up to what was wanted, whose messages all fit; of whole blocks
    where those fit; one granule at least."""
    kv, granule = case.source, 16
    cells = [
        (p.head_stop - p.head_start) * (p.layer_stop - p.layer_start)
        for p in m.pairs(case.source, case.target)
    ]
    row = kv.head_dim * {"float32": 4, "bfloat16": 2, "int8": 1}[kv.dtype]
    widest = max(cells) * 2 * (row + (4 if kv.dtype == "int8" else 0))
    limit = min(case.segment, case.message_bytes // widest)
    step = math.lcm(kv.block_size, case.target.block_size)
    step = step if step <= limit else granule
    expected = max(range(step, limit + 1, step), default=granule)
    size = m.segment_tokens(
        case.source,
        case.target,
        wanted=case.segment,
        granule=granule,
        message_bytes=case.message_bytes,
    )
    assert size == max(expected, granule)


def holes_are_refused(m: ModuleType, case: Case) -> None:
    """A layout that lacks a head of a layer, or deals one to two different ranges, is refused."""
    m.check_layout(case.source)
    for broken in _broken(case.source, random.Random(case.seed)):
        with pytest.raises(SetupError, match=f"heads 0 to {case.source.num_kv_heads - 1}"):
            m.check_layout(broken)


def _broken(kv: KvLayout, rng: random.Random) -> list[KvLayout]:
    fields = {f: getattr(kv, f) for f in kv.__struct_fields__ if f != "ranks"}
    gone = _holding(rng.choice(kv.ranks))
    rest = tuple(r for r in kv.ranks if _holding(r) != gone)
    wide = next((r for r in kv.ranks if r.num_heads > 1), None)
    found = [KvLayout(**fields, ranks=rest)]
    if wide is not None:
        narrow = {f: getattr(wide, f) for f in wide.__struct_fields__}
        narrow["head_stop"] -= 1
        found.append(KvLayout(**fields, ranks=(*kv.ranks, RankLayout(**narrow))))
    return found


CHECKS: tuple[Callable[[ModuleType, Case], None], ...] = (
    elements_once,
    in_order,
    in_turn,
    positions_once,
    largest_unit,
    messages_fit,
    holes_are_refused,
)
