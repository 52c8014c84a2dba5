"""Rows of the embedding, where this rank holds only some of the vocabulary.

Shapes: T tokens, V rows of this rank's shard, C hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 1024


def embed(tokens_T: Tensor, weight_VC: Tensor, start: int, scale: float = 1.0) -> Tensor:
    """[T, C]: row ``token - start`` of the shard, zeros where another rank holds the token.

    ``scale`` multiplies every row, and the product is rounded once.
    """
    hidden = weight_VC.shape[1]
    out_TC = weight_VC.new_empty((tokens_T.shape[0], hidden))
    _embed[(tokens_T.shape[0], triton.cdiv(hidden, _WIDTH))](
        tokens_T, weight_VC, out_TC, start, scale, weight_VC.shape[0], hidden, WIDTH=_WIDTH,
        num_warps=4,
    )  # fmt: skip
    return out_TC


@triton.jit
def _embed(tokens_ptr, weight_ptr, out_ptr, start, scale, rows, hidden, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(tokens_ptr + token).to(tl.int64) - start
    here = (row >= 0) & (row < rows)
    real = places < hidden
    value = tl.load(weight_ptr + tl.where(here, row, 0) * hidden + places, mask=real, other=0.0)
    value = tl.where(here, value, 0.0)
    scaled = (value.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden + places, scaled, mask=real)
