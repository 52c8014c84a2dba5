"""Calls of the kernels as data: tensors in, one ``Op`` out that names their memory.

An ``Op`` holds addresses only: whoever runs it keeps its tensors alive. Outputs are contiguous.
ValueError: a tensor is not as its kernel must have it.
Shapes as in ``ekiden.layers.ops``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ekiden.layers.backends.native.library import Kind, Op, op
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.ops import AttentionKind, HeadShape
from ekiden.layers.rope import Rotation
from ekiden.parallel.communicator import SharedSums

CACHE_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""Quantised caches by the number in ``scaled.h``; another one has the activations' dtype: 0."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
MAX_HEAD_DIM = 256


def norm(x_TC: Tensor, weight_C: Tensor, eps: float, out_TC: Tensor) -> Op:
    """``out_TC`` may be ``x_TC``, and columns of something wider."""
    rows, width = x_TC.shape
    return op(
        Kind.NORM,
        x_TC.dtype,
        [x_TC.data_ptr(), _weight(weight_C), out_TC.data_ptr()],
        [rows, width, x_TC.stride(0), out_TC.stride(0)],
        [eps],
    )


def add_norm(residual_TC: Tensor, x_TC: Tensor, weight_C: Tensor, eps: float, out_TC: Tensor) -> Op:
    """``residual_TC`` becomes the sum."""
    rows, width = x_TC.shape
    return op(
        Kind.ADD_NORM,
        x_TC.dtype,
        [residual_TC.data_ptr(), x_TC.data_ptr(), _weight(weight_C), out_TC.data_ptr()],
        [rows, width, residual_TC.stride(0), x_TC.stride(0), width],
        [eps],
    )


def gated(gate_up: Tensor, activation: str, out_TI: Tensor) -> Op:
    return op(
        Kind.GATED,
        gate_up.dtype,
        [gate_up.data_ptr(), out_TI.data_ptr()],
        [*out_TI.shape, gate_up.stride(0), ACTIVATIONS[activation]],
    )


def embed(tokens_T: Tensor, table_VC: Tensor, first: int, scale: float, out_TC: Tensor) -> Op:
    return op(
        Kind.EMBED,
        table_VC.dtype,
        [tokens_T.data_ptr(), table_VC.data_ptr(), out_TC.data_ptr()],
        [*out_TC.shape, table_VC.shape[0], first, table_VC.stride(0)],
        [scale],
    )


def rotate_and_store(
    qkv_TE: Tensor,
    shape: HeadShape,
    rotation: Rotation,
    cache: Tensor,
    batch: ForwardBatch,
    q_TND: Tensor,
) -> Op:
    norms = shape.norm
    return op(
        Kind.ROTATE_STORE,
        qkv_TE.dtype,
        [
            qkv_TE.data_ptr(),
            rotation.cos_TR.data_ptr(),
            rotation.sin_TR.data_ptr(),
            batch.slots_T.data_ptr(),
            _layer(cache, shape.layer),
            q_TND.data_ptr(),
            *((_weight(norms.q_weight_D), _weight(norms.k_weight_D)) if norms else (0, 0)),
        ],
        [
            *(len(qkv_TE), shape.num_q, shape.num_kv, shape.head_dim),
            *(rotation.cos_TR.shape[1], qkv_TE.stride(0), *_strides(cache)),
            *(cache.shape[4], _format(cache, qkv_TE.dtype), cache.shape[0]),
        ],
        [norms.eps if norms else 0.0],
    )


def attend(
    q_TND: Tensor,
    cache: Tensor,
    layer: int,
    batch: ForwardBatch,
    kind: AttentionKind,
    out_TND: Tensor,
) -> Op:
    sequences, width = batch.block_tables_SM.shape
    heads, dim = q_TND.shape[1:]
    return op(
        Kind.ATTEND,
        q_TND.dtype,
        [
            q_TND.data_ptr(),
            _layer(cache, layer),
            batch.query_starts_S1.data_ptr(),
            batch.kv_lengths_S.data_ptr(),
            batch.block_tables_SM.data_ptr(),
            out_TND.data_ptr(),
        ],
        [
            *(sequences, heads, cache.shape[1], dim, cache.shape[4], width),
            *(*_strides(cache), kind.window, _format(cache, q_TND.dtype), cache.shape[0]),
        ],
        [kind.scale, kind.soft_cap],
    )


def all_reduce(x: Tensor, rank: int, sums: SharedSums) -> Op:
    """``x``, contiguous, becomes the sum."""
    if not x.is_contiguous():
        raise ValueError(f"what is summed over ranks must be contiguous, not {x.stride()}")
    return op(
        Kind.ALL_REDUCE,
        x.dtype,
        [
            x.data_ptr(),
            sums.entered.data_ptr(),
            sums.slots.data_ptr(),
            sums.failures.data_ptr(),
            sums.books.buffer_info()[0],
        ],
        [
            *(x.numel(), sums.ranks, rank, sums.slot_bytes),
            *(len(sums.failures) // 64, int(sums.timeout_s * 1e9)),
        ],
    )


def _layer(cache: Tensor, layer: int) -> int:
    """Address of a layer's first key."""
    return cache.data_ptr() + layer * cache.stride(2) * cache.element_size()


def _strides(cache: Tensor) -> tuple[int, int, int, int]:
    """Bytes from block to block, head to head, K to V, token to token."""
    block, head, _, part, row, _ = cache.stride()
    size = cache.element_size()
    return block * size, head * size, part * size, row * size


def _format(cache: Tensor, dtype: torch.dtype) -> int:
    if cache.dtype not in (dtype, *CACHE_FORMATS):
        raise ValueError(f"a cache of {cache.dtype} cannot hold keys of {dtype} for native kernels")
    return CACHE_FORMATS.get(cache.dtype, 0)


def _weight(weight: Tensor) -> int:
    if weight.dtype != torch.float32 or not weight.is_contiguous():
        raise ValueError(f"a norm's weight must be float32 and contiguous, not {weight.dtype}")
    return weight.data_ptr()
