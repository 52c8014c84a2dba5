"""Units of KV between a cache on a device and host memory: packed on the device, moved in one copy.

Legend of shapes: as in ``boxes.py``; n units of one offset.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ekiden.cache.tensors import as_stored
from kv_transfer.places import Places


def copy_across(source: Places, target: Places, tokens: int) -> None:
    """As ``copy_by_torch``, for any two devices. When it returns every byte is in its place: what
    runs on other threads and streams of the device may read it."""
    packed_UHL2TR = _taken(source, tokens)
    _put(packed_UHL2TR.to(target.memory_UHL2SR.device), target, tokens)
    for memory in (source.memory_UHL2SR, target.memory_UHL2SR):
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()


def _taken(places: Places, tokens: int) -> torch.Tensor:
    """The units one behind the other, on their own device."""
    stored = as_stored(places.memory_UHL2SR)
    if _is_packed(places, tokens):
        return stored
    shape = (len(places.spots), *stored.shape[1:4], tokens, stored.shape[5])
    packed = torch.empty(shape, dtype=stored.dtype, device=stored.device)
    for offset, (units, blocks) in _by_offset(places).items():
        packed[units] = stored[blocks, :, :, :, offset : offset + tokens]
    return packed


def _put(packed_UHL2TR: torch.Tensor, places: Places, tokens: int) -> None:
    stored = as_stored(places.memory_UHL2SR)
    if _is_packed(places, tokens):
        stored.copy_(packed_UHL2TR)
        return
    for offset, (units, blocks) in _by_offset(places).items():
        stored[blocks, :, :, :, offset : offset + tokens] = packed_UHL2TR[units]


def _is_packed(places: Places, tokens: int) -> bool:
    memory = places.memory_UHL2SR
    whole = memory.is_contiguous() and memory.shape[4] == tokens
    return whole and list(places.spots) == [(unit, 0) for unit in range(len(memory))]


def _by_offset(places: Places) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(units, blocks) by their offset in the block, int64 on the device of the memory."""
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for unit, (block, offset) in enumerate(places.spots):
        found[offset].append((unit, block))
    device = places.memory_UHL2SR.device
    return {
        offset: tuple(torch.tensor(pairs, device=device).unbind(1))  # type: ignore[misc]
        for offset, pairs in found.items()
    }
