"""Staging: the only memory a wire ever touches, and the copies between it and the cache.

Legend of shapes: B blocks, H KV heads, L layers, 2 (K and V), S block size, R row.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import msgspec
import torch
import xxhash

from ekiden.core.errors import InvariantBroken
from kv_transfer.boxes import Places, copy_units, native_available
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
        native_available()  # built now, if it must be, and not while a message waits

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


def gather(cache_BHL2SR: torch.Tensor, part: Slice, staging: torch.Tensor) -> None:
    """Copy ``part`` of the cache into ``staging`` (uint8, exactly its size), canonical order."""
    message = _in_message(staging, cache_BHL2SR[:, part.heads, part.layers], part.runs)
    for run, packed in zip(part.runs, message, strict=True):
        copy_units(_in_cache(cache_BHL2SR, part, run), packed, run.tokens)


def scatter(staging: torch.Tensor, part: Slice, cache_BHL2SR: torch.Tensor) -> None:
    """The inverse of ``gather``: bit for bit, and no other element of the cache is written."""
    message = _in_message(staging, cache_BHL2SR[:, part.heads, part.layers], part.runs)
    for run, packed in zip(part.runs, message, strict=True):
        copy_units(packed, _in_cache(cache_BHL2SR, part, run), run.tokens, streamed=True)


def move(
    source_BHL2SR: torch.Tensor, source: Slice, target_BHL2SR: torch.Tensor, target: Slice
) -> None:
    """Copy ``source`` of one cache straight to ``target`` of another, of the same runs and the same
    number of heads and layers; block sizes may differ. No other element is written.

    Raises:
        InvariantBroken: the two do not match, or a block is not in its cache.
    """
    for there, here in zip(source.runs, target.runs, strict=True):
        from_places = _in_cache(source_BHL2SR, source, there)
        to_places = _in_cache(target_BHL2SR, target, here)
        copy_units(from_places, to_places, here.tokens, streamed=True)


def _in_cache(cache_BHL2SR: torch.Tensor, part: Slice, run: Run) -> Places:
    share_BHL2SR = cache_BHL2SR[:, part.heads, part.layers]
    return Places(share_BHL2SR, places(run, part.blocks, cache_BHL2SR.shape[4]))


def _in_message(
    staging: torch.Tensor, like_BHL2SR: torch.Tensor, runs: Sequence[Run]
) -> Iterator[Places]:
    """Of each run, in order: units one behind the other, [heads, layers, 2, tokens, row] each."""
    packed, at = staging.view(like_BHL2SR.dtype), 0
    _, heads, layers, two, _, row = like_BHL2SR.shape
    for run in runs:
        shape = (run.count, heads, layers, two, run.tokens, row)
        end = at + math.prod(shape)
        yield Places(packed[at:end].view(shape), [(unit, 0) for unit in range(run.count)])
        at = end
    if at != packed.numel():
        raise InvariantBroken(f"a message of {packed.numel()} elements should have {at}")


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
