"""What KV must look like after a hand-off to a replica that keeps another dtype.

The slow reference: the engine's own rounding of rows (``ekiden.cache.scaled``), applied to a
whole prompt at once. A row is what one token and head have of K or of V at one layer.
"""

from __future__ import annotations

import numpy as np
import torch

from ekiden.cache.layout import KV_BYTES, is_scaled
from ekiden.cache.scaled import pack_rows, unpack_rows
from ekiden.cache.tensors import KV_TORCH_DTYPES

from .compare import BITS, Bits

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes of an element: a type that torch and numpy both know."""


def converted(bits: Bits, source: str, target: str) -> Bits:
    """Rows ``bits [..., row]`` of KV dtype ``source`` as a cache of ``target`` must keep them.

    Floats round to the nearest, halves to even; a quantised row goes by way of float32.
    """
    if source == target:
        return bits
    rows, kind = bits_tensor(bits, source), KV_TORCH_DTYPES[target]
    numbers = _dequantised(rows, source) if is_scaled(source) else rows
    return tensor_bits(pack_rows(numbers, kind) if is_scaled(target) else numbers.to(kind), target)


def tensor_bits(rows: torch.Tensor, dtype: str) -> Bits:
    """The bit patterns of a part of a cache of KV dtype ``dtype``, in the same shape."""
    found: Bits = rows.contiguous().view(_SAME_SIZE[KV_BYTES[dtype]]).numpy().view(BITS[dtype])
    return found


def bits_tensor(bits: Bits, dtype: str) -> torch.Tensor:
    """The inverse: elements of a cache of KV dtype ``dtype`` with these bits."""
    signed = np.ascontiguousarray(bits).view(f"{'u' if bits.itemsize == 1 else 'i'}{bits.itemsize}")
    return torch.from_numpy(signed).view(KV_TORCH_DTYPES[dtype])


def _dequantised(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    return unpack_rows(rows.view(torch.uint8), KV_TORCH_DTYPES[dtype], torch.float32)
