"""The cache of one rank as a torch tensor, and the few things done to it.

Shapes: ``cache [blocks, kv_heads, layers, 2, block_size, row]`` as ``layout.py`` says; T tokens,
K local KV heads, D head dim, B block size. ``layer`` counts from the rank's first. The dtype of a
cache says whether its rows are quantised: int8 and float8_e4m3fn are (``scaled.py``).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from ekiden.cache.layout import KvLayout
from ekiden.cache.scaled import LARGEST, pack_rows, unpack_rows
from ekiden.core.cores import usable_cores

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Of weights and activations."""
KV_TORCH_DTYPES = {**TORCH_DTYPES, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
_TOUCHING_THREADS = 8
"""At most, for the first touch of a cache's pages."""


def allocate_cache(
    layout: KvLayout, rank: int, num_blocks: int, device: torch.device | str = "cpu"
) -> Tensor:
    """A zeroed, contiguous cache for ``rank``, ``num_blocks * layout.block_bytes(rank)`` bytes.

    Raises:
        MemoryError, RuntimeError: there is not so much memory on ``device``.
    """
    shape = (num_blocks, *layout.block_shape(rank))
    dtype = KV_TORCH_DTYPES[layout.dtype]
    if torch.device(device).type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        return _on_huge_pages(num_blocks * layout.block_bytes(rank)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def allocate_shared_cache(layout: KvLayout, rank: int, num_blocks: int) -> tuple[Tensor, int]:
    """As ``allocate_cache`` on a CPU, in an anonymous file that other processes can map; its
    descriptor lives as long as the process, and the memory until the last mapping of it is gone.

    Raises:
        MemoryError: there is not so much memory.
    """
    size = max(num_blocks * layout.block_bytes(rank), 1)
    fd = os.memfd_create("ekiden-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"{size} bytes of shared memory: {error.strerror}") from error
    shape = (num_blocks, *layout.block_shape(rank))
    return _touched(mapped, size).view(KV_TORCH_DTYPES[layout.dtype]).view(shape), fd


def _on_huge_pages(size: int) -> Tensor:
    """Zeros, uint8. A head's part of a block is a small page, and attention jumps from one to the
    next: finding them through page tables costs a fifth of a decode step of many rows.
    """
    try:
        mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from error
    return _touched(mapped, size)


def _touched(mapped: mmap.mmap, size: int) -> Tensor:
    with suppress(OSError):  # a kernel without huge pages has small ones
        mapped.madvise(mmap.MADV_HUGEPAGE)
    cache = torch.frombuffer(mapped, dtype=torch.uint8)[:size]
    # Touched now: memory that is not there should be missed when a replica starts. By several
    # threads: the first touch of a page may cost ten times what writing to it does.
    threads = min(usable_cores(), _TOUCHING_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(Tensor.zero_, cache.chunk(threads)):
            pass
    return cache


def write_kv(cache: Tensor, layer: int, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """Put one layer's keys and values of T tokens into their slots, none of them negative.

    A slot is block * block_size + offset, int64. Numbers become what the cache can hold.
    """
    block_size = cache.shape[4]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    rows, scaled = as_stored(cache), cache.dtype in LARGEST
    for part, x_TKD in enumerate((k_TKD, v_TKD)):
        stored = pack_rows(x_TKD, cache.dtype) if scaled else x_TKD.to(cache.dtype)
        rows[blocks_T, :, layer, part, offsets_T] = stored


def read_kv(
    cache: Tensor, layer: int, blocks: Sequence[int], length: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The keys and values of positions [0, length) of a block table, each [length, K, D].

    In ``dtype``; None: as they are kept, a quantised cache's in float32.
    """
    table = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
    kv = as_stored(cache)[:, :, layer].index_select(0, table)
    rows_2TK = kv.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :length]
    default = torch.float32 if cache.dtype in LARGEST else cache.dtype
    k_TKD, v_TKD = as_numbers(rows_2TK, cache.dtype, dtype or default)
    return k_TKD, v_TKD


def as_stored(cache: Tensor) -> Tensor:
    """The same memory as elements that may be copied about: bytes where rows are quantised."""
    return cache.view(torch.uint8) if cache.dtype in LARGEST else cache


def as_numbers(rows: Tensor, kind: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Rows taken from ``as_stored`` of a cache of ``kind``, [..., row], as [..., D] ``dtype``."""
    return unpack_rows(rows, kind, dtype) if kind in LARGEST else rows.to(dtype)


def copy_blocks(cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, (source, target) pairs. All sources are read before any is written."""
    if not pairs:
        return
    sources, targets = torch.tensor(pairs, dtype=torch.int64, device=cache.device).unbind(1)
    stored = as_stored(cache)
    stored.index_copy_(0, targets, stored.index_select(0, sources))
