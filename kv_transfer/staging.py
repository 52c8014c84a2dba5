"""Staging: memory that the wires use, and the copies between it and the cache.

Legend of shapes: B blocks, H KV heads, L layers, 2 (K and V), S block size, R row.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
import xxhash

from ekiden.core.errors import InvariantBroken
from kv_transfer.boxes import copy_units, native_available
from kv_transfer.convert import copy_converted, kv_dtype, row_width
from kv_transfer.places import Places
from kv_transfer.reshard import Run, places
from kv_transfer.transports.base import Pieces

TRAILER = struct.Struct("<QQ")
"""Ends every message: its tag and the xxh3-64 checksum, seeded with the tag, of its payload."""


class Message(NamedTuple):
    """A payload, wherever it lies, and the trailer behind it. ``whole``: both, for a wire.
    ``in_place``: the payload is in the cache, not in staging."""

    payload: Pieces
    trailer: memoryview
    whole: Pieces
    in_place: bool


class Slots:
    """A fixed arena cut into equal slots; a slot is with one owner or free.

    A slot whose message has not completed stays with the wire, whoever gave the message up.
    ``pinned``: a device reads and writes the arena itself.
    """

    def __init__(self, count: int, slot_bytes: int, *, pinned: bool = False) -> None:
        self.slot_bytes = -(-slot_bytes // 4096) * 4096
        self.count = count
        self._arena = torch.empty(count * self.slot_bytes, dtype=torch.uint8, pin_memory=pinned)
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

    def message(self, slot: int, size: int, elsewhere: Pieces | None = None) -> Message:
        """A message with a payload of ``size`` bytes, in the slot unless it is ``elsewhere``."""
        whole = self.bytes(slot, size + TRAILER.size)
        if elsewhere is None:
            return Message([whole[:size]], whole[size:], [whole], False)
        return Message(elsewhere, whole[size:], [*elsewhere, whole[size:]], True)

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
    """Copy ``part`` of the cache into ``staging`` (uint8, exactly its size), canonical order.

    Raises:
        InvariantBroken: ``staging`` has another size, or a block is not in the cache.
    """
    message = _in_message(staging, part, cache_BHL2SR, cache_BHL2SR.dtype)
    for run, packed in zip(part.runs, message, strict=True):
        copy_units(_in_cache(cache_BHL2SR, part, run), packed, run.tokens)


def scatter(
    staging: torch.Tensor, part: Slice, cache_BHL2SR: torch.Tensor, dtype: str | None = None
) -> None:
    """The inverse of ``gather``, and no other element of the cache is written.

    ``dtype``: the KV dtype that ``staging`` was gathered in (a key of ``KV_BYTES``), if it may be
    another than the cache's: rows are converted. The same one moves bit for bit.

    Raises:
        InvariantBroken: ``staging`` has another size, or a block is not in the cache.
    """
    kind = cache_BHL2SR.dtype if dtype is None else kv_dtype(dtype)
    message = _in_message(staging, part, cache_BHL2SR, kind)
    for run, packed in zip(part.runs, message, strict=True):
        copy_converted(packed, _in_cache(cache_BHL2SR, part, run), run.tokens)


def move(
    source_BHL2SR: torch.Tensor, source: Slice, target_BHL2SR: torch.Tensor, target: Slice
) -> None:
    """Copy ``source`` of one cache straight to ``target`` of another, of the same runs and the same
    number of heads and layers. Block sizes may differ, and dtypes: rows are converted then. No
    other element is written.

    Raises:
        InvariantBroken: the two do not match, or a block is not in its cache.
    """
    if source.runs != target.runs:
        raise InvariantBroken(f"runs {source.runs} cannot move to {target.runs}")
    for run in source.runs:
        there = _in_cache(source_BHL2SR, source, run)
        copy_converted(there, _in_cache(target_BHL2SR, target, run), run.tokens)


def _in_cache(cache_BHL2SR: torch.Tensor, part: Slice, run: Run) -> Places:
    end, capacity = run.position + run.tokens * run.count, len(part.blocks) * cache_BHL2SR.shape[4]
    if end > capacity:
        raise InvariantBroken(f"positions up to {end} are not in {len(part.blocks)} blocks")
    share_BHL2SR = cache_BHL2SR[:, part.heads, part.layers]
    return Places(share_BHL2SR, places(run, part.blocks, cache_BHL2SR.shape[4]))


def _in_message(
    staging: torch.Tensor, part: Slice, cache_BHL2SR: torch.Tensor, dtype: torch.dtype
) -> Iterator[Places]:
    """Of each run, in order: units one behind the other, [heads, layers, 2, tokens, row] each, the
    rows of ``dtype``."""
    packed, row = staging.view(dtype), row_width(cache_BHL2SR, dtype)
    _, heads, layers, two, _, _ = cache_BHL2SR[:, part.heads, part.layers].shape
    shapes = [(run.count, heads, layers, two, run.tokens, row) for run in part.runs]
    sizes = [math.prod(shape) for shape in shapes]
    if sum(sizes) != packed.numel():
        raise InvariantBroken(f"a message of {packed.numel()} elements should have {sum(sizes)}")
    at = 0
    for shape, size in zip(shapes, sizes, strict=True):
        units = packed[at : at + size].view(shape)
        yield Places(units, [(unit, 0) for unit in range(len(units))])
        at += size


def seal_message(message: Message, tag: int) -> int:
    """Write the trailer of a message whose payload is complete; returns the checksum."""
    checksum = _checksum(message.payload, tag)
    message.trailer[:] = TRAILER.pack(tag, checksum)
    return checksum


def open_message(message: Message, tag: int) -> int | None:
    """The checksum of a received message, or None if tag or checksum do not agree."""
    checksum = _checksum(message.payload, tag)
    return checksum if TRAILER.unpack(message.trailer) == (tag, checksum) else None


def _checksum(payload: Pieces, seed: int) -> int:
    if len(payload) == 1:
        return xxhash.xxh3_64_intdigest(payload[0], seed=seed)
    digest = xxhash.xxh3_64(seed=seed)
    for piece in payload:
        digest.update(piece)
    return digest.intdigest()
