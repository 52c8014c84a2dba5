"""The inner loop of both attention kernels: queries over a range of one sequence's keys.

Shapes: R query rows of one KV head, L keys of one turn, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ekiden.layers.backends.triton import kv

_PLAIN = tl.constexpr(kv.PLAIN)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_range(
    q_RD, cache_ptr, table_ptr, begin, end, cache_block, positions_R, scale, window,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Online softmax (arXiv:1805.02867) of query rows R over the keys at [begin, end).

    ``MASKED`` says that rows may not see all of them: a row at position p sees key j where j <= p
    and, with a window, p - j < window. Returns the row's largest score in binary logarithms, the
    sum of weights relative to it, and the weighted values [R, DIMS], all float32.
    """
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    dims = tl.arange(0, DIMS)
    best_R = tl.full((ROWS,), float("-inf"), tl.float32)
    total_R = tl.zeros((ROWS,), tl.float32)
    acc_RD = tl.zeros((ROWS, DIMS), tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        held = keys < end
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        rows = block * cache_block + (keys % BLOCK_SIZE) * WIDTH
        k_LD = kv.load_rows(cache_ptr, rows, held, dims, HEAD_DIM, STORED, q_RD.dtype)
        scores = tl.dot(q_RD, tl.trans(k_LD), input_precision=precision) * scale
        if STORED != _PLAIN:
            scores *= kv.load_scales(cache_ptr, rows, held, HEAD_DIM)[None, :]
        if SOFTCAP > 0:
            scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)
        scores *= _LOG2E  # from here on weights are powers of 2
        seen = held[None, :]
        if MASKED:
            back = positions_R[:, None] - keys[None, :]
            seen = seen & (back >= 0) & ((window <= 0) | (back < window))
        scores = tl.where(seen, scores, float("-inf"))
        higher_R = tl.maximum(best_R, tl.max(scores, axis=1))
        # A row that has seen no key yet has no best: any finite one keeps its weights at 0.
        base_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)
        weights = tl.exp2(scores - base_R[:, None])
        shrink_R = tl.exp2(best_R - base_R)
        total_R = total_R * shrink_R + tl.sum(weights, axis=1)
        rows += BLOCK_SIZE * WIDTH
        v_LD = kv.load_rows(cache_ptr, rows, held, dims, HEAD_DIM, STORED, q_RD.dtype)
        if STORED != _PLAIN:
            weights *= kv.load_scales(cache_ptr, rows, held, HEAD_DIM)[None, :]
        acc_RD = acc_RD * shrink_R[:, None]
        acc_RD = tl.dot(weights.to(q_RD.dtype), v_LD, acc_RD, input_precision=precision)
        best_R = higher_R
    return best_R, total_R, acc_RD
