"""Reshard: every element of decode's cache is written exactly once, from the right source."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import EMPTY, empty_cache, layout, read, truth, write

from ekiden.cache.layout import KvLayout
from ekiden.core.errors import SetupError
from kv_transfer import reshard
from kv_transfer.staging import Slice, gather, scatter

SPLITS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3), (4, 2)]


def move(
    source: KvLayout,
    target: KvLayout,
    start: int,
    end: int,
    size: int,
    source_blocks: list[int],
    target_blocks: list[int],
    caches: list[torch.Tensor],
) -> None:
    """A hand-off without any wire, from freshly written source caches into ``caches``."""
    sources = [empty_cache(source, rank, 32) for rank in range(len(source.ranks))]
    for rank, cache in enumerate(sources):
        write(cache, source, rank, source_blocks, end)
    unit = reshard.unit_tokens(source, target)
    for pair in reshard.pairs(source, target):
        for first, last in reshard.segments(start, end, size):
            runs = tuple(reshard.runs(first, last, unit))
            staging = torch.empty(pair.token_bytes(source) * (last - first), dtype=torch.uint8)
            heads, layers = pair.local(source.ranks[pair.source])
            part = Slice(heads=heads, layers=layers, runs=runs, blocks=source_blocks)
            gather(sources[pair.source], part, staging)
            heads, layers = pair.local(target.ranks[pair.target])
            part = Slice(heads=heads, layers=layers, runs=runs, blocks=target_blocks)
            scatter(staging, part, caches[pair.target])


def check_move(
    source: KvLayout, target: KvLayout, start: int, end: int, size: int, rotate: int = 3
) -> None:
    source_blocks = [(i * 7 + rotate) % 32 for i in range(32)]
    target_blocks = [(i * 11 + rotate) % 32 for i in range(32)]
    caches = [empty_cache(target, rank, 32) for rank in range(len(target.ranks))]
    move(source, target, start, end, size, source_blocks, target_blocks, caches)
    for rank, cache in enumerate(caches):
        got = read(cache, target, target_blocks, end)
        assert torch.equal(got[start:], truth(target, rank, end)[start:])
        moved = (end - start) * cache[0, :, :, :, 0].numel()
        assert int((cache != EMPTY).sum()) == moved, "something outside was written"


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("source_split", SPLITS)
@pytest.mark.parametrize("target_split", SPLITS)
def test_every_element_comes_once_from_a_rank_that_has_it(
    kv_heads: int, source_split: tuple[int, int], target_split: tuple[int, int]
) -> None:
    source = layout(tp=source_split[0], pp=source_split[1], kv_heads=kv_heads, layers=5)
    target = layout(tp=target_split[0], pp=target_split[1], kv_heads=kv_heads, layers=5)
    written: Counter[tuple[int, int, int]] = Counter()
    for pair in reshard.pairs(source, target):
        held, wanted = source.ranks[pair.source], target.ranks[pair.target]
        for head, layer in itertools.product(
            range(pair.head_start, pair.head_stop), range(pair.layer_start, pair.layer_stop)
        ):
            assert held.head_start <= head < held.head_stop
            assert held.layer_start <= layer < held.layer_stop
            assert wanted.head_start <= head < wanted.head_stop
            assert wanted.layer_start <= layer < wanted.layer_stop
            written[pair.target, head, layer] += 1
    expected = {
        (rank, head, layer)
        for rank, r in enumerate(target.ranks)
        for head in range(r.head_start, r.head_stop)
        for layer in range(r.layer_start, r.layer_stop)
    }
    assert written == Counter(expected)


@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (32, 16), (48, 32)])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_values_land_where_they_belong(blocks: tuple[int, int], kv_heads: int) -> None:
    for (stp, spp), (ttp, tpp) in [((2, 1), (1, 1)), ((1, 2), (3, 1)), ((4, 2), (2, 2))]:
        source = layout(tp=stp, pp=spp, kv_heads=kv_heads, block_size=blocks[0])
        target = layout(tp=ttp, pp=tpp, kv_heads=kv_heads, block_size=blocks[1])
        check_move(source, target, 0, 75, 32)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pair_of_layouts_and_any_range_moves_exactly(data: st.DataObject) -> None:
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    sides = []
    for _ in range(2):
        tp, pp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        block_size = data.draw(st.sampled_from([1, 2, 3, 4, 6, 16]))
        sides.append(
            layout(tp=tp, pp=pp, kv_heads=kv_heads, layers=3, block_size=block_size, head_dim=1)
        )
    limit = 32 * min(side.block_size for side in sides)
    end = data.draw(st.integers(0, min(limit, 70)))
    start = data.draw(st.integers(0, end))
    size = data.draw(st.integers(1, 40))
    if start < end:
        check_move(sides[0], sides[1], start, end, size, data.draw(st.integers(0, 31)))


def test_replicated_heads_are_sent_by_all_replicas_in_turn() -> None:
    source, target = layout(tp=4, kv_heads=1), layout(tp=4, kv_heads=1)
    assert sorted(pair.source for pair in reshard.pairs(source, target)) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_moves_bit_for_bit(dtype: str) -> None:
    check_move(layout(tp=2, dtype=dtype), layout(tp=1, dtype=dtype), 0, 50, 16)


def test_a_layout_that_leaves_a_head_out_is_refused() -> None:
    good = layout(tp=2, kv_heads=2)
    broken = type(good)(
        **{f: getattr(good, f) for f in good.__struct_fields__ if f != "ranks"},
        ranks=good.ranks[:1],
    )
    reshard.check_layout(good)
    with pytest.raises(SetupError, match=r"layer 0 the KV heads \[0\]"):
        reshard.check_layout(broken)


@given(start=st.integers(0, 200), length=st.integers(0, 200), size=st.integers(1, 64))
def test_segments_cover_the_range_once_and_are_cut_on_one_grid(
    start: int, length: int, size: int
) -> None:
    cut = reshard.segments(start, start + length, size)
    assert [p for a, b in cut for p in range(a, b)] == list(range(start, start + length))
    assert all(a // size == (b - 1) // size for a, b in cut)


def test_messages_stay_within_their_bytes() -> None:
    source, target = layout(tp=2, head_dim=64), layout(tp=1, head_dim=64)
    widest = max(pair.token_bytes(source) for pair in reshard.pairs(source, target))
    size = reshard.segment_tokens(
        source, target, wanted=256, granule=16, message_bytes=widest * 100
    )
    assert size == 96
    tight = reshard.segment_tokens(source, target, wanted=256, granule=16, message_bytes=1)
    assert tight == 16
