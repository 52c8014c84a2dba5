"""Paged attention equals a slow, plain reference over random batches, whatever lies in blocks."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.cache.tensors import write_kv
from ekiden.layers import grouping
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.batch import ForwardBatch, Span
from ekiden.layers.ops import AttentionKind

DIM = 8
LAYERS = 3


def reference(q_TND: Tensor, k_LKD: Tensor, v_LKD: Tensor, start: int, window: int) -> Tensor:
    """One sequence, one query at a time, one head at a time, in float64."""
    out = torch.zeros_like(q_TND, dtype=torch.float64)
    group = q_TND.shape[1] // k_LKD.shape[1]
    for t in range(q_TND.shape[0]):
        stop = start + t + 1
        first = max(0, stop - window) if window else 0
        for head in range(q_TND.shape[1]):
            k = k_LKD[first:stop, head // group].double()
            v = v_LKD[first:stop, head // group].double()
            weights = (k @ q_TND[t, head].double() / DIM**0.5).softmax(0)
            out[t, head] = weights @ v
    return out


def attend(q: Tensor, cache: Tensor, layer: int, batch: ForwardBatch, window: int = 0) -> Tensor:
    return TorchOps().attend(q, cache, layer, batch, AttentionKind(DIM**-0.5, window))


def run_both(
    lengths: list[tuple[int, int]], kv_heads: int, group: int, window: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Attention of sequences with (cached, new) tokens, by the backend and by the reference."""
    generator = torch.Generator().manual_seed(len(lengths) * 31 + window)
    shuffled = list(range(450))
    random.Random(window).shuffle(shuffled)
    cache = torch.full((450, kv_heads, LAYERS, 2, block_size, DIM), float("nan"))
    spans, expected, queries = [], [], []
    for cached, new in lengths:
        blocks = [shuffled.pop() for _ in range(-(-(cached + new) // block_size) + 1)]
        k, v = torch.randn(2, cached + new, kv_heads, DIM, generator=generator)
        q = torch.randn(new, kv_heads * group, DIM, generator=generator)
        whole = ForwardBatch.build([Span([0] * (cached + new), 0, blocks, 0)], block_size)
        write_kv(cache, 1, k, v, whole.slots_T)
        spans.append(Span([0] * new, cached, blocks, 1))
        queries.append(q)
        expected.append(reference(q, k, v, cached, window))
    batch = ForwardBatch.build(spans, block_size)
    out = attend(torch.cat(queries), cache, 1, batch, window)
    return out.double(), torch.cat(expected)


@settings(max_examples=30, deadline=None)
@example(lengths=[(0, 20), (0, 7)], kv_heads=2, group=3, window=5, block_size=4)
@example(lengths=[(40, 1), (25, 1), (40, 1)], kv_heads=1, group=3, window=5, block_size=16)
@example(lengths=[(40, 1), (40, 1)], kv_heads=2, group=1, window=16, block_size=4)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 7, 20])), min_size=1, max_size=7
    ),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([0, 1, 5, 16, 100]),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_paged_attention_equals_the_reference(
    lengths: list[tuple[int, int]], kv_heads: int, group: int, window: int, block_size: int
) -> None:
    out, expected = run_both(lengths, kv_heads, group, window, block_size)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 5000), st.sampled_from([1, 1, 1, 2, 50])), min_size=1, max_size=30
    )
)
def test_groups_cover_every_row_once_and_stay_small_and_similar(
    lengths: list[tuple[int, int]],
) -> None:
    starts = [0]
    for _, new in lengths:
        starts.append(starts[-1] + new)
    ends = [cached + new for cached, new in lengths]
    tables = torch.arange(-(-max(ends) // 16)).expand(len(ends), -1)
    groups = grouping.group_sequences(starts, ends, tables, 16, 0)
    rows = torch.cat([torch.arange(starts[-1])[group.rows] for group in groups])
    assert sorted(rows.tolist()) == list(range(starts[-1]))
    for group in groups:
        sequences = group.table_GM.shape[0]
        assert sequences == 1 or sequences * group.length <= grouping.MAX_GROUP_TOKENS
        assert sequences == 1 or group.query_len == 1
        if group.beyond_GL is not None:
            shortest = group.length - int(group.beyond_GL.sum(1).max())
            assert 2 * shortest >= group.length


def test_a_long_batch_is_attended_in_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "MAX_GROUP_TOKENS", 40)
    out, expected = run_both([(15, 1)] * 7, 2, 3, 0, 4)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_stays_within_its_own_rounding() -> None:
    batch = ForwardBatch.build([Span([0] * 9, 0, [3], 1), Span([0], 4, [1], 1)], 16)
    cache = torch.randn(5, 2, LAYERS, 2, 16, DIM)
    q = torch.randn(10, 4, DIM)
    exact = attend(q, cache, 0, batch)
    half = attend(q.bfloat16(), cache.bfloat16(), 0, batch)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)
