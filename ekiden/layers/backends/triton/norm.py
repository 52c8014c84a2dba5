"""RMSNorm (arXiv:1910.07467), alone and with the residual addition before it.

Shapes: T rows (any leading shape, contiguous), C columns. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis, as a new tensor of x's dtype.

    ``weight_C`` may have any float dtype.
    """
    x_TC = _rows(x_TC)
    out = x_TC.new_empty(x_TC.shape)
    rows, columns = x_TC.numel() // x_TC.shape[-1], x_TC.shape[-1]
    stride = x_TC.stride(0) if x_TC.dim() == 2 else columns
    _rms_norm[(rows,)](
        x_TC, x_TC, weight_C, x_TC, out, stride, columns, eps, ADD=False, **_shape(columns)
    )
    return out


def add_rms_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum) of ``x + residual``, both new, both of x's dtype.

    The sum is rounded before it is normalised, as it is where the two are done one by one.
    Both inputs are contiguous and of one dtype.
    """
    out, total = x_TC.new_empty(x_TC.shape), x_TC.new_empty(x_TC.shape)
    rows, columns = x_TC.numel() // x_TC.shape[-1], x_TC.shape[-1]
    _rms_norm[(rows,)](
        x_TC, residual_TC, weight_C, total, out, columns, columns, eps, ADD=True, **_shape(columns),
    )  # fmt: skip
    return out, total


def _rows(x: Tensor) -> Tensor:
    """As it is where rows are evenly spaced, else a copy."""
    even = x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)
    return x if even else x.contiguous()


def _shape(columns: int) -> dict[str, int]:
    width = triton.next_power_of_2(columns)
    return {"WIDTH": width, "num_warps": max(1, min(16, width // 512))}


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, total_ptr, out_ptr, x_row, columns, eps, ADD: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, WIDTH)
    real = places < columns
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_row + places, mask=real, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * columns + places, mask=real, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(total_ptr + row * columns + places, total, mask=real)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / columns + eps)
    weight = tl.load(weight_ptr + places, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + places, (x * scale * weight).to(dtype), mask=real)
