"""Staging: the only memory a wire ever touches, and the copies between it and the cache.

Legend of shapes: B blocks, H KV heads, L layers, 2 (K and V), S block size, D head_dim;
n positions that lie together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec
import torch
import xxhash

from ekiden.core.errors import InvariantBroken
from kv_transfer.reshard import Run, places

TRAILER = struct.Struct("<QQ")
"""Ends every message: its tag and the xxh3-64 checksum, seeded with the tag, of its payload."""


class Slots:
    """A fixed arena cut into equal slots; a slot is with one owner or free.

    A slot whose message has not completed stays with the wire, whoever gave the message up.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // 4096) * 4096
        self.count = count
        self._arena = torch.empty(count * self.slot_bytes, dtype=torch.uint8)
        self._bytes = self._arena.numpy().data
        # Last in, first out: the slot used last is the one still in the processor's cache.
        self._free = list(range(count))

    @property
    def arena(self) -> memoryview:
        return self._bytes

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free slot; look at ``free`` first."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        if slot in self._free:
            raise InvariantBroken(f"staging slot {slot} was given back twice")
        self._free.append(slot)

    def bytes(self, slot: int, size: int) -> memoryview:
        start = slot * self.slot_bytes
        return self._bytes[start : start + size]

    def tensor(self, slot: int, size: int) -> torch.Tensor:
        start = slot * self.slot_bytes
        return self._arena[start : start + size]


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one rank's cache: local heads and layers, runs of positions, a block table."""

    heads: slice
    layers: slice
    runs: tuple[Run, ...]
    blocks: Sequence[int]


def gather(cache_BHL2SD: torch.Tensor, part: Slice, staging: torch.Tensor) -> None:
    """Copy ``part`` of the cache into ``staging`` (uint8, exactly its size), canonical order."""
    for spot_HL2nD, packed_HL2nD in _matched(cache_BHL2SD, part, staging):
        packed_HL2nD.copy_(spot_HL2nD)


def scatter(staging: torch.Tensor, part: Slice, cache_BHL2SD: torch.Tensor) -> None:
    """The inverse of ``gather``: bit for bit, and no other element of the cache is written."""
    for spot_HL2nD, packed_HL2nD in _matched(cache_BHL2SD, part, staging):
        spot_HL2nD.copy_(packed_HL2nD)


def move(
    source_BHL2SD: torch.Tensor, source: Slice, target_BHL2SD: torch.Tensor, target: Slice
) -> None:
    """Copy ``source`` of one cache straight to ``target`` of another, of the same runs and the same
    number of heads and layers; block sizes may differ. No other element is written."""
    pairs = zip(_spots(source_BHL2SD, source), _spots(target_BHL2SD, target), strict=True)
    for from_HL2nD, to_HL2nD in pairs:
        to_HL2nD.copy_(from_HL2nD)


def _spots(cache_BHL2SD: torch.Tensor, part: Slice) -> Iterator[torch.Tensor]:
    """The place in the cache of each unit, [heads, layers, 2, tokens, row]."""
    for run in part.runs:
        for block, offset in places(run, part.blocks, cache_BHL2SD.shape[4]):
            yield cache_BHL2SD[block, part.heads, part.layers, :, offset : offset + run.tokens]


def _matched(
    cache_BHL2SD: torch.Tensor, part: Slice, staging: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(in the cache, in the staging) of each unit. One copy a unit: a call of ``index_select``
    was not faster, and ``index_copy_`` reached a fifth of this (31 GB/s in cache)."""
    packed, at = staging.view(cache_BHL2SD.dtype), 0
    for spot in _spots(cache_BHL2SD, part):
        yield spot, packed[at : at + spot.numel()].view(spot.shape)
        at += spot.numel()


def seal_message(message: memoryview, tag: int) -> int:
    """Write the trailer of a message whose payload is in place; returns the checksum."""
    payload = message[: -TRAILER.size]
    checksum = xxhash.xxh3_64_intdigest(payload, seed=tag)
    message[-TRAILER.size :] = TRAILER.pack(tag, checksum)
    return checksum


def open_message(message: memoryview, tag: int) -> int | None:
    """The checksum of a received message, or None if tag or checksum do not agree."""
    said_tag, said_checksum = TRAILER.unpack(message[-TRAILER.size :])
    checksum = xxhash.xxh3_64_intdigest(message[: -TRAILER.size], seed=tag)
    return checksum if (said_tag, said_checksum) == (tag, checksum) else None
