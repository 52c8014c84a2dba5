"""Rows of a quantised KV cache: bytes with their float32 scale behind them.

A row x of ``head_dim`` numbers is kept as ``x / scale``, rounded to the nearest that the byte can
say (halves to even), with ``scale = max|x| / largest byte``; a row of zeros has the scale 0. The
kernels of every device write the very same bytes. One scale a token and head: what a request reads
never depends on its neighbours, and a moved block needs nothing that is not in it.

Shapes: D head dim; a row is D + 4 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ekiden.cache.layout import SCALE_BYTES

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""By dtype of a quantised cache: the byte of largest size."""


def pack_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``x [..., D]`` of any float dtype as uint8 [..., D + 4] for a cache of ``dtype``."""
    x32 = x.float()
    scale = x32.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    # Where the scale is 0 any divisor will do, for the row is 0 (or too small for a float32).
    scaled = x32 / scale.masked_fill(scale == 0, 1.0)
    rounded = scaled.round() if dtype == torch.int8 else scaled
    return torch.cat((rounded.to(dtype).view(torch.uint8), scale.view(torch.uint8)), dim=-1)


def unpack_rows(rows: Tensor, kind: torch.dtype, dtype: torch.dtype) -> Tensor:
    """What ``pack_rows`` made of [..., D] for a cache of ``kind``, in the float ``dtype``."""
    values, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    numbers: Tensor = values.view(kind).float() * scale.contiguous().view(torch.float32)
    return numbers.to(dtype)
