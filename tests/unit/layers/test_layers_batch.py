"""One step laid out as tensors, and what the cache's small functions do to blocks."""

from __future__ import annotations

import pytest
import torch

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.cache.tensors import allocate_cache, copy_blocks, read_kv, write_kv
from ekiden.layers.batch import ForwardBatch, Span


def test_spans_are_laid_end_to_end_with_their_positions_and_slots() -> None:
    batch = ForwardBatch.build(
        [Span([11, 12, 13], 3, [7, 2], 0), ([14], 8, (5, 6, 9), 1)],  # type: ignore[list-item]
        block_size=4,
    )
    assert batch.tokens_T.tolist() == [11, 12, 13, 14]
    assert batch.positions_T.tolist() == [3, 4, 5, 8]
    assert batch.slots_T.tolist() == [31, 8, 9, 36]
    assert batch.query_starts == [0, 3, 4]
    assert batch.kv_lengths == [6, 9]
    assert batch.logit_rows_R.tolist() == [3]


def test_a_span_that_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks of 4 do not cover 9 positions"):
        ForwardBatch.build([Span([1], 8, [0, 1], 1)], 4)
    with pytest.raises(ValueError, match="no tokens"):
        ForwardBatch.build([Span([], 0, [0], 1)], 4)


def layout(dtype: str = "float32") -> KvLayout:
    rank = RankLayout(tp_rank=0, pp_rank=0, head_start=0, head_stop=2, layer_start=0, layer_stop=3)
    return KvLayout(
        dtype=dtype,
        block_size=4,
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        tp=1,
        pp=1,
        ranks=(rank,),
    )


def test_a_cache_is_zeroed_contiguous_and_as_large_as_its_layout_says() -> None:
    cache = allocate_cache(layout("bfloat16"), 0, 5)
    assert cache.shape == (5, 2, 3, 2, 4, 8)
    assert cache.is_contiguous()
    assert cache.nbytes == 5 * layout("bfloat16").block_bytes(0)
    assert not cache.any()


def test_what_is_written_is_read_back_and_nothing_else_changes() -> None:
    cache = allocate_cache(layout(), 0, 5)
    k, v = torch.randn(2, 6, 2, 8)
    blocks = torch.tensor([4, 4, 4, 4, 1, 1])
    write_kv(cache, 2, k, v, blocks * 4 + torch.tensor([0, 1, 2, 3, 0, 1]))
    k_back, v_back = read_kv(cache, 2, [4, 1], 6)
    assert torch.equal(k_back, k)
    assert torch.equal(v_back, v)
    assert torch.equal(cache[4, 1, 2, 1, 3], v[3, 1])  # [block, head, layer, V, offset]
    assert int((cache != 0).sum()) == k.numel() + v.numel()


def test_copies_read_every_source_before_they_write() -> None:
    cache = allocate_cache(layout(), 0, 4)
    cache[:] = torch.arange(4.0).view(4, 1, 1, 1, 1, 1)
    copy_blocks(cache, [(0, 1), (1, 2)])
    assert cache[:, 0, 0, 0, 0, 0].tolist() == [0.0, 0.0, 1.0, 3.0]
    copy_blocks(cache, [])
