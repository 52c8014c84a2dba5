"""The cache of one rank as a torch tensor, and the few things done to it.

Shapes: ``cache [blocks, kv_heads, layers, 2, block_size, head_dim]`` as ``layout.py`` says;
T tokens, K local KV heads, D head dim, B block size. ``layer`` counts from the rank's first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ekiden.cache.layout import KvLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def allocate_cache(
    layout: KvLayout, rank: int, num_blocks: int, device: torch.device | str = "cpu"
) -> Tensor:
    """A zeroed, contiguous cache for ``rank``, ``num_blocks * layout.block_bytes(rank)`` bytes."""
    shape = (num_blocks, *layout.block_shape(rank))
    return torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)


def write_kv(cache: Tensor, layer: int, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """Put one layer's keys and values of T tokens into their slots, none of them negative.

    A slot is block * block_size + offset, int64.
    """
    block_size = cache.shape[4]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    cache[blocks_T, :, layer, 0, offsets_T] = k_TKD
    cache[blocks_T, :, layer, 1, offsets_T] = v_TKD


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
