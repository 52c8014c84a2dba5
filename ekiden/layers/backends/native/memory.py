"""Memory for weights: huge pages, so that streaming a matrix does not wait for the page tables.

Matrices smaller than a huge page share one, so they are cut from long stretches. A stretch is
address space: what no matrix has been cut from takes no memory, but for the rest of a page.
"""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
STRETCH = 64 << 20
ALIGNMENT = 64
"""A cache line, and an AVX-512 register."""


class _Stretches:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        room = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if room > len(self._rest):
                self._rest = _stretch(max(room, STRETCH))
            taken, self._rest = self._rest[:size], self._rest[room:]
        return taken


def _stretch(size: int) -> Tensor:
    """Zeros whose first byte begins a huge page; freed when no tensor shows them any more."""
    mapped = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE
    return whole[skipped : skipped + size]


_stretches = _Stretches()


def allocate(size: int) -> Tensor:
    """``size`` bytes of zeros, uint8, aligned to 64.

    Raises:
        OSError: the system refuses the memory.
    """
    return _stretches.take(size)


def own_pages(size: int) -> Tensor:
    """As ``allocate``, on huge pages of its own, which go back to the system with the tensor."""
    return _stretch(size)
