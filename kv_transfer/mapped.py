"""On a mapped wire no payload is sent: a notice says where in the sender's pool a segment is, and
the answer that it was read.

Until the answer the sender holds the blocks; if it gives the session up before, it never seals it,
and what was read is never used.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ekiden.cache.layout import KvLayout
from ekiden.cache.tensors import KV_TORCH_DTYPES
from ekiden.core.errors import ReplicaFailed

BLOCK_BYTES = 4


def blocks_of(start: int, end: int, block_size: int) -> range:
    """Places in a block table from position 0 of the blocks that hold positions [start, end)."""
    return range(start // block_size, -(-end // block_size))


def notice_bytes(start: int, end: int, block_size: int) -> int:
    return len(blocks_of(start, end, block_size)) * BLOCK_BYTES


def write_notice(
    into: memoryview, start: int, end: int, block_size: int, table: Sequence[int]
) -> None:
    """The sender's blocks of positions [start, end), uint32 each; ``into`` has exactly the size."""
    which = blocks_of(start, end, block_size)
    into[:] = np.asarray(table[which.start : which.stop], dtype="<u4").tobytes()


def read_notice(notice: memoryview) -> npt.NDArray[np.uint32]:
    return np.frombuffer(bytes(notice), dtype="<u4")


def as_cache(pool: memoryview, layout: KvLayout, rank: int) -> torch.Tensor:
    """A mapped pool as [blocks, kv_heads, layers, 2, block_size, row]; reading is all it is for.

    Raises:
        ReplicaFailed: its size does not fit ``layout``.
    """
    block = layout.block_bytes(rank)
    if pool.nbytes < block:
        raise ReplicaFailed(f"its pool has {pool.nbytes} bytes, and a block of it {block}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to is what we want
        flat = torch.frombuffer(pool, dtype=torch.uint8)
    blocks = pool.nbytes // block
    whole = flat[: blocks * block].view(KV_TORCH_DTYPES[layout.dtype])
    return whole.view(blocks, *layout.block_shape(rank))
