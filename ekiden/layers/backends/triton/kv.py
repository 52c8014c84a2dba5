"""Rows of the paged cache, as the attention kernels read them and the rotation writes them.

What a row is, and what its bytes are, says ``ekiden.cache.scaled``: numbers of the model's dtype,
or ``head_dim`` bytes (int8, or e4m3) with a float32 scale behind them. The bytes written here are
the same ones. e4m3 is taken apart and put together with integer operations: the conversion is
exact, and works on devices without FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ekiden.cache.layout import SCALE_BYTES

PLAIN, INT8, FP8 = 0, 1, 2

_PLAIN, _INT8, _FP8 = tl.constexpr(PLAIN), tl.constexpr(INT8), tl.constexpr(FP8)


def layer_view(cache: Tensor, layer: int) -> Tensor:
    """``[blocks, K, 2, B, row]`` of one layer of ``[blocks, K, layers, 2, B, row]``, in place."""
    return cache.select(2, layer)


def rows_of(view: Tensor, head_dim: int) -> tuple[Tensor, int]:
    """The view as a kernel takes it, a quantised one as int8, and the kind of its rows.

    Raises:
        ValueError: it does not hold rows of ``head_dim``, or they are not contiguous in a head.
    """
    kind = {torch.int8: INT8, torch.float8_e4m3fn: FP8}.get(view.dtype, PLAIN)
    _, _, two, block_size, width = view.shape
    wanted = head_dim if kind == PLAIN else head_dim + SCALE_BYTES
    if (two, width) != (2, wanted) or view.stride()[2:] != (block_size * width, width, 1):
        raise ValueError(
            f"a cache of shape {tuple(view.shape)}, strides {view.stride()} and {view.dtype} "
            f"does not hold rows of head_dim {head_dim}"
        )
    return (view.view(torch.int8) if kind == FP8 else view), kind


@triton.jit
def load_rows(
    ptr, rows_L, seen_L, dims_D, D: tl.constexpr, STORED: tl.constexpr, dtype: tl.constexpr
):
    """Rows [L, D] in ``dtype``, not yet scaled; rows that are not seen are 0."""
    values_LD = tl.load(
        ptr + rows_L[:, None] + dims_D[None, :],
        mask=seen_L[:, None] & (dims_D < D)[None, :],
        other=0,
    )
    if STORED == _FP8:
        values_LD = decode_e4m3(values_LD)
    elif STORED == _INT8:
        values_LD = values_LD.to(tl.float32)
    return values_LD.to(dtype)


@triton.jit
def load_scales(ptr, rows_L, seen_L, D: tl.constexpr):
    """The float32 scale behind each row [L]; 0 where a row is not seen."""
    scales_L = (ptr + rows_L + D).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(scales_L, mask=seen_L, other=0.0)


@triton.jit
def store_rows(ptr, rows_L, wanted_L, values_LD, dims_D, D: tl.constexpr, STORED: tl.constexpr):
    """Write rows [L, D] (float32, 0 beyond D) where wanted, with their scales."""
    places_LD = ptr + rows_L[:, None] + dims_D[None, :]
    mask_LD = wanted_L[:, None] & (dims_D < D)[None, :]
    if STORED == _PLAIN:
        tl.store(places_LD, values_LD.to(ptr.dtype.element_ty), mask=mask_LD)
    else:
        peak: tl.constexpr = 127.0 if STORED == _INT8 else 448.0
        largest_L = tl.max(tl.abs(values_LD), axis=1)
        scale_L = tl.div_rn(largest_L, tl.full(largest_L.shape, peak, tl.float32))
        # A row of zeros has the scale 0; any divisor gives its bytes, which are 0 as well.
        divisor_L = tl.where(scale_L > 0, scale_L, 1.0)
        scaled_LD = tl.div_rn(values_LD, divisor_L[:, None] + tl.zeros_like(values_LD))
        bytes_LD = round_even(scaled_LD).to(tl.int8) if STORED == _INT8 else encode_e4m3(scaled_LD)
        tl.store(places_LD, bytes_LD, mask=mask_LD)
        scales_L = (ptr + rows_L + D).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales_L, scale_L, mask=wanted_L)


@triton.jit
def round_even(x):
    """To the nearest whole number, halves to even; for |x| below 2**22."""
    # In float32 the sum has no room for a fraction, and the addition rounds to even.
    magic: tl.constexpr = 12582912.0  # 1.5 * 2**23
    return (x + magic) - magic


@triton.jit
def decode_e4m3(byte):
    """e4m3 in int8 to float32. The two NaN patterns, which are never written, give 480."""
    bits = byte.to(tl.int32)
    # As a float16, the same bits stand 8 binary exponents too low; subnormals agree as well.
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def encode_e4m3(x):
    """float32 to e4m3 in int8: to nearest, halves to even, larger than 448 to 448."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Normal numbers: move the exponent's bias from 127 to 7, round 23 fraction bits to 3.
    moved = bits - (120 << 23)
    normal = (moved + 0x7FFFF + ((moved >> 20) & 1)) >> 20
    # Below 2**-6 the step is 2**-9, which is the last place of 2**14 (0x46800000).
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.int8)
