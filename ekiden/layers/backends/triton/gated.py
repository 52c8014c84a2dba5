"""The gate of a feed-forward layer (arXiv:2002.05202): ``act(gate) * up``, computed in float32.

Shapes: T rows, I inner width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")
_WIDTH = 1024


def gated(gate_up_TX: Tensor, activation: str) -> Tensor:
    """``act(x[:, :I]) * x[:, I:]`` of ``gate_up_TX [T, 2I]``, as a new [T, I].

    The activation is rounded to the dtype before the product, as it is where the two are done one
    by one. Raises ValueError for an activation that is neither silu nor gelu_tanh.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown: choose silu or gelu_tanh")
    rows, inner = gate_up_TX.shape[0], gate_up_TX.shape[1] // 2
    out_TI = gate_up_TX.new_empty((rows, inner))
    _gated[(rows, triton.cdiv(inner, _WIDTH))](
        gate_up_TX, out_TI, gate_up_TX.stride(0), inner, SILU=activation == "silu", WIDTH=_WIDTH,
        num_warps=4,
    )  # fmt: skip
    return out_TI


@triton.jit
def _gated(x_ptr, out_ptr, x_row, inner, SILU: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = places < inner
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * x_row + places, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + inner + places, mask=real, other=0.0).to(tl.float32)
    if SILU:
        active = gate * tl.sigmoid(gate)
    else:
        # tanh(z) = 2 sigmoid(2z) - 1, so half of 1 + tanh(z) is sigmoid(2z); sqrt(2/pi) = 0.79...
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    product = active.to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row * inner + places, product.to(dtype), mask=real)
