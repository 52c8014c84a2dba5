"""Copies between caches and staging: every element once, from the right place, nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import EMPTY, empty_cache, layout, read, truth, write

from ekiden.cache.layout import KvLayout
from ekiden.core.errors import InvariantBroken
from kv_transfer import reshard
from kv_transfer.staging import Slice, gather, move, scatter

BLOCKS = 40


@st.composite
def ranges(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, int, int]:
    """(source, target, start, end) of a hand-off of at most 40 blocks."""
    kv_heads, dtype = draw(st.sampled_from([1, 3])), draw(st.sampled_from(["float32", "bfloat16"]))
    source, target = (
        layout(
            tp=draw(st.integers(1, 4)),
            pp=draw(st.integers(1, 3)),
            kv_heads=kv_heads,
            layers=3,
            block_size=draw(st.sampled_from([1, 2, 3, 4, 6, 16])),
            head_dim=2,
            dtype=dtype,
        )
        for _ in range(2)
    )
    end = draw(st.integers(1, BLOCKS * min(source.block_size, target.block_size)))
    return source, target, draw(st.integers(0, end - 1)), end


@settings(max_examples=40, deadline=None)
@given(ranges())
def test_a_move_writes_what_is_meant_and_nothing_else(
    case: tuple[KvLayout, KvLayout, int, int],
) -> None:
    source, target, start, end = case
    source_blocks = [(i * 7 + 3) % BLOCKS for i in range(BLOCKS)]
    target_blocks = [(i * 11 + 3) % BLOCKS for i in range(BLOCKS)]
    sources = [empty_cache(source, rank, BLOCKS) for rank in range(len(source.ranks))]
    targets = [empty_cache(target, rank, BLOCKS) for rank in range(len(target.ranks))]
    for rank, cache in enumerate(sources):
        write(cache, source, rank, source_blocks, end)
    runs = tuple(reshard.runs(start, end, reshard.unit_tokens(source, target)))
    for pair in reshard.pairs(source, target):
        from_heads, from_layers = pair.local(source.ranks[pair.source])
        to_heads, to_layers = pair.local(target.ranks[pair.target])
        move(
            sources[pair.source],
            Slice(heads=from_heads, layers=from_layers, runs=runs, blocks=source_blocks),
            targets[pair.target],
            Slice(heads=to_heads, layers=to_layers, runs=runs, blocks=target_blocks),
        )
    for rank, cache in enumerate(targets):
        got = read(cache, target, target_blocks, end)[start:]
        assert torch.equal(got, truth(target, rank, end)[start:])
        moved = (end - start) * cache[0, :, :, :, 0].numel()
        assert int((cache != EMPTY).sum()) == moved, "something outside was written"


@pytest.mark.parametrize(("end", "blocks"), [(17, [1]), (33, [0, 1]), (20, [1, 2])])
def test_positions_or_blocks_that_are_not_there_are_refused(end: int, blocks: list[int]) -> None:
    kv = layout()
    cache, other = empty_cache(kv, 0, 2), empty_cache(kv, 0, 3)
    runs = tuple(reshard.runs(0, end, 16))
    bad = Slice(heads=slice(0, 2), layers=slice(0, 4), runs=runs, blocks=blocks)
    good = Slice(heads=slice(0, 2), layers=slice(0, 4), runs=runs, blocks=[2, 0, 1])
    message = torch.zeros(end * kv.token_bytes(), dtype=torch.uint8)
    with pytest.raises(InvariantBroken, match=r"are not in|lie outside"):
        move(cache, bad, other, good)
    with pytest.raises(InvariantBroken, match=r"are not in|lie outside"):
        move(other, good, cache, bad)
    with pytest.raises(InvariantBroken, match=r"are not in|lie outside"):
        gather(cache, bad, message)
    with pytest.raises(InvariantBroken, match=r"are not in|lie outside"):
        scatter(message, bad, cache)
