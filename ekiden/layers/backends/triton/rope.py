"""Rotation of q and k (arXiv:2104.09864), their norms and the write to the cache, in one pass.

Shapes: T tokens, N query heads, K KV heads, D head dim, R rotated dims (the first of D; usually
all), B block size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ekiden.layers.backends.triton import kv

_HEADS = 4
"""Heads that one program takes."""


def rotate_and_store(
    qkv_TX: Tensor, cos_TR: Tensor, sin_TR: Tensor, slots_T: Tensor, view: Tensor, q_TND: Tensor, *,
    q_weight_D: Tensor | None = None, k_weight_D: Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """Split ``qkv_TX [T, (N + 2K) * D]``: rotated q to ``q_TND``, rotated k and v to the cache.

    ``cos_TR`` and ``sin_TR`` are float32, the halves of R rotated as in the Llama checkpoints.
    ``slots_T`` (int32 or int64) are block * block_size + offset; a negative one (a padded row)
    writes nothing. Both weights, or none: each head of q and k is RMS-normalised before it is
    turned, and rounded to its dtype between (Qwen3). ``view`` is one layer (``kv.layer_view``).

    Raises:
        ValueError: a cache that does not hold rows of this head dim.
    """
    tokens, heads, head_dim = q_TND.shape
    view, stored = kv.rows_of(view, head_dim)
    _, kv_heads, _, block_size, width = view.shape
    normed = q_weight_D is not None and k_weight_D is not None
    _rotate_and_store[(tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        qkv_TX, cos_TR, sin_TR, slots_T, view, q_TND, q_weight_D if normed else qkv_TX,
        k_weight_D if normed else qkv_TX, qkv_TX.stride(0), cos_TR.stride(0), q_TND.stride(0),
        view.stride(0), view.stride(1), eps, NORMED=normed, STORED=stored, QUERIES=heads,
        KEYS=kv_heads, HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim),
        TURNED=cos_TR.shape[-1], WIDTH=width, BLOCK_SIZE=block_size, HEADS=_HEADS,
        num_warps=4 if head_dim >= 64 else 2,
    )  # fmt: skip


@triton.jit
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, cache_ptr, q_ptr, q_weight_ptr, k_weight_ptr, qkv_row,
    angle_row, q_row, cache_block, cache_head, eps, NORMED: tl.constexpr, STORED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    TURNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    is_q, is_k = head < QUERIES, (head >= QUERIES) & (head < QUERIES + KEYS)
    exists = head < QUERIES + 2 * KEYS

    half: tl.constexpr = TURNED // 2
    partner = tl.where(dims < half, dims + half, tl.where(dims < TURNED, dims - half, dims))
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    source = qkv_ptr + token * qkv_row + head[:, None] * HEAD_DIM
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    x = tl.load(source + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        own = _weights(q_weight_ptr, k_weight_ptr, dims, is_q, HEAD_DIM)
        its = _weights(q_weight_ptr, k_weight_ptr, partner, is_q, HEAD_DIM)
        turned = (is_q | is_k)[:, None]
        x = tl.where(turned, (x * scale[:, None] * own).to(dtype).to(tl.float32), x)
        other = (other * scale[:, None] * its).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * angle_row + dims, mask=dims < TURNED, other=1.0)
    sin = tl.load(sin_ptr + token * angle_row + dims, mask=dims < TURNED, other=0.0)
    sin = tl.where(dims < half, -sin, sin)
    rotated = x * cos[None, :] + other * sin[None, :]
    y = tl.where((is_q | is_k)[:, None], rotated, x)

    places = q_ptr + token * q_row + head[:, None] * HEAD_DIM + dims[None, :]
    tl.store(places, y.to(dtype), mask=is_q[:, None] & (dims < HEAD_DIM)[None, :])
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        kv_head = tl.where(is_k, head - QUERIES, head - QUERIES - KEYS)
        plane = tl.where(is_k, 0, BLOCK_SIZE * WIDTH)
        rows = (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * WIDTH
        rows += kv_head * cache_head + plane
        # What is quantised is what the plain cache would hold, rounded to the model's dtype.
        held = y.to(dtype).to(tl.float32)
        kv.store_rows(cache_ptr, rows, exists & ~is_q, held, dims, HEAD_DIM, STORED)


@triton.jit
def _weights(q_weight_ptr, k_weight_ptr, dims, is_q, HEAD_DIM: tl.constexpr):
    """[heads, D] float32: the q norm's weight for heads of q, the k norm's for others."""
    q_weight = tl.load(q_weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
