"""Faults that systems of this kind have shown when KV went from one layout to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kv_rig import DTYPES, EMPTY, empty_cache, layout, read, truth, write

from ekiden.cache.layout import KvLayout
from ekiden.core.clock import ManualClock
from kv_transfer import reshard
from kv_transfer.ledger import Ledger
from kv_transfer.staging import Slice, gather, move, scatter

TOKENS = 75
SOURCE, TARGET = [7, 3, 1, 5, 9], [2, 4, 6, 8, 0]


def move_pair(
    pair: reshard.Pair,
    source: KvLayout,
    target: KvLayout,
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
) -> None:
    runs = tuple(reshard.runs(0, TOKENS, reshard.unit_tokens(source, target)))
    heads, layers = pair.local(source.ranks[pair.source])
    there = Slice(heads=heads, layers=layers, runs=runs, blocks=SOURCE)
    heads, layers = pair.local(target.ranks[pair.target])
    here = Slice(heads=heads, layers=layers, runs=runs, blocks=TARGET)
    move(sources[pair.source], there, targets[pair.target], here)


def filled(kv: KvLayout) -> list[torch.Tensor]:
    caches = [empty_cache(kv, rank, 10) for rank in range(len(kv.ranks))]
    for rank, cache in enumerate(caches):
        write(cache, kv, rank, SOURCE, TOKENS)
    return caches


def check_moved(source: KvLayout, target: KvLayout) -> None:
    """Every element, and no byte more than decode's ranks hold."""
    sources, targets = filled(source), [empty_cache(target, r, 10) for r in range(target.tp)]
    found = reshard.pairs(source, target)
    for pair in found:
        move_pair(pair, source, target, sources, targets)
    for rank, cache in enumerate(targets):
        assert torch.equal(read(cache, target, TARGET, TOKENS), truth(target, rank, TOKENS))
    held = sum(target.block_bytes(rank) for rank in range(len(target.ranks)))
    assert sum(pair.token_bytes(source) for pair in found) * target.block_size == held


@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (1, 4), (4, 2), (2, 4)])
def test_replicated_kv_heads_are_not_counted_as_heads_of_their_own(
    prefill: int, decode: int
) -> None:
    """F5: 2 KV heads and 8 query heads, TP 4 to 1, 1 to 4, 4 to 2."""
    shape: dict[str, Any] = {"kv_heads": 2, "q_heads": 8}
    check_moved(layout(tp=prefill, **shape), layout(tp=decode, **shape))


@pytest.mark.parametrize(("prefill", "decode"), [(2, 4), (4, 2), (3, 8), (1, 4)])
def test_the_one_kv_head_of_mqa_reaches_every_replica(prefill: int, decode: int) -> None:
    """F7: one KV head, replicated on both sides."""
    shape: dict[str, Any] = {"kv_heads": 1, "q_heads": 8}
    source, target = layout(tp=prefill, **shape), layout(tp=decode, **shape)
    check_moved(source, target)
    assert [p.target for p in reshard.pairs(source, target)] == list(range(decode))


@pytest.mark.parametrize("stages", [2, 3])
def test_a_stage_that_sent_nothing_leaves_the_hand_off_incomplete(stages: int) -> None:
    """F9: the layers of later stages come from later stages, and are waited for."""
    source, target = layout(pp=stages, layers=5), layout(layers=5)
    sources, targets = filled(source), [empty_cache(target, 0, 10)]
    found = reshard.pairs(source, target)
    ledger = Ledger({(pair.source, pair.target): 1 for pair in found}, ManualClock())
    *early, last = found
    for pair in early:
        move_pair(pair, source, target, sources, targets)
        ledger.add(pair.source, pair.target, pair.token_bytes(source) * TOKENS, 1)
    per_layer = read(targets[0], target, TARGET, TOKENS).permute(2, 0, 1, 3, 4).flatten(1)
    empty = [layer for layer in range(5) if per_layer[layer].eq(EMPTY).all()]
    assert empty == list(range(last.layer_start, last.layer_stop))
    assert not ledger.all_complete
    move_pair(last, source, target, sources, targets)
    ledger.add(last.source, last.target, last.token_bytes(source) * TOKENS, 1)
    assert ledger.all_complete
    assert torch.equal(read(targets[0], target, TARGET, TOKENS), truth(target, 0, TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_caches_that_begin_at_one_address_are_told_apart(dtype: str) -> None:
    """F12: two caches of one storage, the same first byte, of different lengths and blocks."""
    small, large = (layout(dtype=dtype, head_dim=8, block_size=size) for size in (16, 32))
    storage = torch.zeros(10 * large.block_bytes(0), dtype=torch.uint8)
    one, other = (
        storage[: 10 * kv.block_bytes(0)].view(DTYPES[dtype]).view(10, *kv.block_shape(0))
        for kv in (small, large)
    )
    assert one.data_ptr() == other.data_ptr()
    runs = tuple(reshard.runs(0, TOKENS, 16))
    message = torch.empty(TOKENS * 2 * 4 * 2 * small.row_bytes, dtype=torch.uint8)
    for cache, kv in ((other, large), (one, small)):
        write(cache, kv, 0, SOURCE, TOKENS)
        part = Slice(heads=slice(0, 2), layers=slice(0, 4), runs=runs, blocks=SOURCE)
        gather(cache, part, message)
        got = empty_cache(kv, 0, 10)
        scatter(
            message, Slice(heads=slice(0, 2), layers=slice(0, 4), runs=runs, blocks=TARGET), got
        )
        same = read(got, kv, TARGET, TOKENS).contiguous().view(torch.uint8)
        assert torch.equal(same, truth(kv, 0, TOKENS).contiguous().view(torch.uint8))
