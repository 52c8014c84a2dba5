"""Attention of prefill chunks over the paged cache: queries of several sequences end to end.

After FlashAttention 2 (arXiv:2307.08691): a program takes a tile of queries of one sequence and
one KV head; a tile's rows are (query, head of the group) pairs, so keys are read once a group.

Shapes: S sequences, T rows, N query heads, K KV heads, D head dim, B block size, M blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ekiden.layers.backends.triton import kv
from ekiden.layers.backends.triton.softmax import attend_range
from ekiden.layers.ops import AttentionKind

_TILE_BYTES = 32 << 10
"""Of a tile's queries: what is left of shared memory holds the keys and values of two turns."""
_MOST_ROWS = 128
_KEYS = 64
"""Keys of one turn of the loop; half of it for long rows."""


def prefill_attention(
    q_TND: Tensor, view: Tensor, table_SM: Tensor, lengths_S: Tensor, query_starts: Tensor,
    out_TND: Tensor, kind: AttentionKind, *, longest_query: int, skip_single: bool = False,
) -> None:  # fmt: skip
    """Causal attention of every query over its own sequence; writes ``out_TND``.

    ``query_starts`` [S + 1] are offsets into T; the queries of a sequence are its last positions.
    ``lengths_S`` counts cached keys, this step's included. ``longest_query`` (any bound on the
    queries of one sequence) only chooses the tile. ``skip_single`` leaves rows of sequences with
    one query alone, for ``decode_attention``. The rest is as there.

    Raises:
        ValueError: a cache that does not hold rows of this head dim.
    """
    tokens, heads, head_dim = q_TND.shape
    view, stored = kv.rows_of(view, head_dim)
    _, kv_heads, _, block_size, width = view.shape
    group, sequences = heads // kv_heads, table_SM.shape[0]
    row_bytes = head_dim * q_TND.element_size()
    exact = q_TND.dtype == torch.float32
    rows = tile_rows(longest_query, group, row_bytes, exact)
    queries = rows // group
    # No sequence starts in the middle of a tile: each may need one more than its share.
    _prefill[(tokens // queries + sequences, kv_heads)](
        q_TND, view, table_SM, lengths_S, query_starts, out_TND, q_TND.stride(0), q_TND.stride(1),
        out_TND.stride(0), out_TND.stride(1), view.stride(0), view.stride(1), table_SM.stride(0),
        sequences, kind.scale, kind.window, SOFTCAP=kind.soft_cap, SKIP_SINGLE=skip_single,
        STORED=stored, GROUP=group, QUERIES=queries, ROWS=rows, HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)), WIDTH=width, BLOCK_SIZE=block_size,
        KEYS=_KEYS if row_bytes <= 256 else _KEYS // 2, EXACT=exact,
        num_warps=8 if rows >= 128 else 4, num_stages=2,
    )  # fmt: skip


def tile_rows(longest_query: int, group: int, row_bytes: int, exact: bool) -> int:
    """Rows of a tile, a power of two: one query's whole group at least, and not too many.

    Products in float32 have no matrix unit: what is unrolled for them is kept small.
    """
    most = 32 if exact else min(_MOST_ROWS, _TILE_BYTES // row_bytes)
    wanted = min(longest_query * group, most)
    return int(triton.next_power_of_2(max(16, group, wanted)))


# Counts that change from step to step would else be compiled anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["sequences"])
def _prefill(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, out_ptr, q_row, q_head, out_row, out_head,
    cache_block, cache_head, table_row, sequences, scale, window, SOFTCAP: tl.constexpr,
    SKIP_SINGLE: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(tile, starts_ptr, sequences, QUERIES)
    start = tl.load(starts_ptr + sequence).to(tl.int32)
    count = tl.load(starts_ptr + sequence + 1).to(tl.int32) - start
    first = (tile - (start // QUERIES + sequence)) * QUERIES
    if first >= count:
        return
    if SKIP_SINGLE and count == 1:
        return
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    cached = length - count

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    query = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    real = ((rows < QUERIES * GROUP) & (query < count))[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (start + query).to(tl.int64)
    q_RD = tl.load(
        q_ptr + tokens[:, None] * q_row + heads[:, None] * q_head + dims[None, :],
        mask=real,
        other=0.0,
    )
    begin = tl.where(window > 0, tl.maximum(cached + first - window + 1, 0), 0)
    end = tl.minimum(cached + first + QUERIES, length)
    _, total, acc = attend_range(
        q_RD, cache_ptr + kv_head.to(tl.int64) * cache_head,
        table_ptr + sequence.to(tl.int64) * table_row, begin, end, cache_block, cached + query,
        scale, window, SOFTCAP, True, STORED, ROWS, HEAD_DIM, DIMS, WIDTH, BLOCK_SIZE, KEYS, EXACT,
    )  # fmt: skip
    out_RD = acc / tl.where(total > 0, total, 1.0)[:, None]
    places = out_ptr + tokens[:, None] * out_row + heads[:, None] * out_head + dims[None, :]
    tl.store(places, out_RD.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _sequence_of(tile, starts_ptr, sequences, QUERIES: tl.constexpr):
    """Sequence s owns the tiles from ``starts[s] // QUERIES + s`` on: the last that begins by
    ``tile``, by bisection."""
    low, high = tl.full((), 0, tl.int32), sequences + tl.full((), 0, tl.int32)
    while low < high:
        middle = (low + high) // 2
        begin = tl.load(starts_ptr + middle).to(tl.int32) // QUERIES + middle
        if begin <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1
