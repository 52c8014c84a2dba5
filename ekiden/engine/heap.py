"""The C library's heap while weights are loaded: what is freed goes back to the system at once.

Loading frees as many bytes as it keeps, in large blocks (a slice, then its packed form). glibc
learns from the first of them to keep such blocks for later, between the weights that stay, and a
rank's resident memory would end far above what it holds.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of mallopt(3)."""
_LOADING = 256 << 10
"""Blocks from this size on are mapped alone while weights are loaded."""
_COMPUTING = 32 << 20
"""The same for steps, where blocks come again and again; the most that glibc takes."""


@contextmanager
def returning_freed_blocks() -> Iterator[None]:
    """Large blocks that are freed inside are given back. Does nothing without glibc."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LOADING)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _COMPUTING)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _COMPUTING)  # as glibc would have learnt it
        libc.malloc_trim(0)
