"""Memory for what lies between operations, used again as soon as nobody shows it any more.

A step's tensors have the same few sizes in every layer. Taken anew from the system, large ones
would be cleared page by page each time; used again, they are still in the processor's caches.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.layers.backends.native.memory import allocate, own_pages

Memory = NDArray[np.uint8]

SPARE_BYTES = 256 << 20
"""Free memory that an arena keeps at most."""
_LEAST = 64
_OWN_PAGES = 1 << 20


class Arena:
    """Hands out uninitialised tensors. Used from one thread."""

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._spare_bytes = spare_bytes
        self._small: dict[int, list[Memory]] = {}
        self._large: dict[int, list[Memory]] = {}
        self.spare = 0
        """Bytes of large pieces that nobody shows now."""
        self._lent: dict[int, tuple[weakref.ref[Memory], Memory]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Contiguous, aligned to 64; its memory comes back when the last view of it is gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._take(_size_class(nbytes))
        # Views share a storage, and the storage holds this array: when it goes, all have gone.
        array = memory[:nbytes]
        reference = weakref.ref(array, self._take_back)
        self._lent[id(reference)] = reference, memory
        return torch.from_numpy(array).view(dtype).view(shape)

    def _take(self, size: int) -> Memory:
        if size < _OWN_PAGES:
            kept = self._small.get(size)
            # Cut from a long stretch that goes back only as a whole, so these are never dropped.
            return kept.pop() if kept else allocate(size).numpy()
        kept = self._large.get(size)
        if not kept:
            return own_pages(size).numpy()
        self.spare -= size
        return kept.pop()

    def _take_back(self, reference: weakref.ref[Memory]) -> None:
        _, memory = self._lent.pop(id(reference))
        size = memory.nbytes
        if size < _OWN_PAGES:
            self._small.setdefault(size, []).append(memory)
            return
        # Sizes that come back often are last, and the last to go.
        kept = self._large.pop(size, [])
        kept.append(memory)
        self._large[size] = kept
        self.spare += size
        while self.spare > self._spare_bytes:
            self._drop_stalest()

    def _drop_stalest(self) -> None:
        size, kept = next(iter(self._large.items()))
        if kept:
            kept.pop()
            self.spare -= size
        else:
            del self._large[size]


def _size_class(size: int) -> int:
    """At least ``size``, at most a quarter more, so that steps of other sizes share memory."""
    step = max(_LEAST, 1 << max(0, size.bit_length() - 3))
    return -(-max(size, 1) // step) * step
