"""The cache of one rank as a torch tensor, and the few things done to it.

Shapes: ``cache [blocks, kv_heads, layers, 2, block_size, head_dim]`` as ``layout.py`` says;
T tokens, K local KV heads, D head dim, B block size. ``layer`` counts from the rank's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.cache.layout import KvLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Slots(NamedTuple):
    """Where tokens live in the cache: their block, and their place inside it."""

    blocks_T: Tensor
    offsets_T: Tensor


def allocate_cache(
    layout: KvLayout, rank: int, num_blocks: int, device: torch.device | str = "cpu"
) -> Tensor:
    """A zeroed, contiguous cache for ``rank``, ``num_blocks * layout.block_bytes(rank)`` bytes."""
    shape = (num_blocks, *layout.block_shape(rank))
    return torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)


def write_kv(cache: Tensor, layer: int, k_TKD: Tensor, v_TKD: Tensor, slots: Slots) -> None:
    """Put one layer's keys and values of T tokens into their slots."""
    cache[slots.blocks_T, :, layer, 0, slots.offsets_T] = k_TKD
    cache[slots.blocks_T, :, layer, 1, slots.offsets_T] = v_TKD


def read_kv(cache: Tensor, layer: int, blocks: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """The keys and values of positions [0, length) of a block table, each [length, K, D]."""
    table = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
    kv = cache[:, :, layer].index_select(0, table)
    k_TKD, v_TKD = kv.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :length]
    return k_TKD, v_TKD


def copy_blocks(cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, (source, target) pairs. All sources are read before any is written."""
    if not pairs:
        return
    sources, targets = torch.tensor(pairs, dtype=torch.int64, device=cache.device).unbind(1)
    cache.index_copy_(0, targets, cache.index_select(0, sources))
