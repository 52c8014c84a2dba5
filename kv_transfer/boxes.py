"""Copies units of KV between memories that are laid out differently: a cache, a message.

A unit is some positions that lie together in both: a box [heads, layers, 2, tokens, row]. The
native library copies all the units of a run in one call, without the GIL; where there is none,
torch copies one after the other.

Legend of shapes: U units or blocks, H KV heads, L layers, 2 (K and V), S positions, R row.
"""

from __future__ import annotations

import logging
from functools import cache

from ekiden.core.errors import InvariantBroken
from ekiden.layers.backends.native.build import NativeUnavailable
from ekiden.layers.backends.native.copies import Axis, Boxes
from ekiden.layers.backends.native.library import load
from kv_transfer.across import copy_across
from kv_transfer.places import Places

logger = logging.getLogger(__name__)


@cache
def native_available() -> bool:
    """Loads the native copies, which may have to be built (10 s): call it at start-up."""
    try:
        load()
    except NativeUnavailable as reason:
        logger.warning("KV is copied and converted by torch, which is slower: %s", reason)
        return False
    return True


def copy_units(source: Places, target: Places, tokens: int, *, streamed: bool = False) -> None:
    """Copy every unit, of ``tokens`` positions, from its spot to its spot: the same bytes.

    ``streamed``: the target is not read soon, and is written past the processor's cache.

    Raises:
        InvariantBroken: the two sides do not match, or a unit lies outside its memory.
    """
    check_places(source, target, tokens)
    there, here = source.memory_UHL2SR, target.memory_UHL2SR
    if (there.dtype, there.shape[5]) != (here.dtype, here.shape[5]):
        raise InvariantBroken(
            f"rows of {there.shape[5]} {there.dtype} cannot be copied to rows of {here.shape[5]} "
            f"{here.dtype}"
        )
    if use_native(source, target):
        copy_native(source, target, tokens, streamed=streamed)
    elif there.device != here.device or there.is_cuda:
        copy_across(source, target, tokens)
    else:
        copy_by_torch(source, target, tokens)


def use_native(source: Places, target: Places) -> bool:
    memories = (source.memory_UHL2SR, target.memory_UHL2SR)
    return native_available() and all(memory.device.type == "cpu" for memory in memories)


def copy_by_torch(source: Places, target: Places, tokens: int) -> None:
    """The slow reference."""
    for (block, offset), (to_block, to_offset) in zip(source.spots, target.spots, strict=True):
        unit_HL2SR = source.memory_UHL2SR[block, :, :, :, offset : offset + tokens]
        target.memory_UHL2SR[to_block, :, :, :, to_offset : to_offset + tokens].copy_(unit_HL2SR)


def copy_native(source: Places, target: Places, tokens: int, *, streamed: bool) -> None:
    """Without any check."""
    memory = source.memory_UHL2SR
    piece = tokens * memory.shape[5] * memory.element_size()
    native_boxes(source, target).copy(piece, streamed=streamed)


def native_boxes(source: Places, target: Places) -> Boxes:
    """The units as the native library takes them, by shapes and strides; both must stay alive."""
    there, here = source.memory_UHL2SR, target.memory_UHL2SR
    sizes = there.element_size(), here.element_size()
    heads, planes = (
        Axis(count, there.stride(axis) * sizes[0], here.stride(axis) * sizes[1])
        for count, axis in ((there.shape[1], 1), (there.shape[2] * 2, 3))
    )
    return Boxes(
        there.data_ptr(), _offsets(source), here.data_ptr(), _offsets(target), heads, planes
    )


def _offsets(places: Places) -> list[int]:
    """Of each unit, in bytes."""
    memory = places.memory_UHL2SR
    block_bytes = memory.stride(0) * memory.element_size()
    position_bytes = memory.stride(4) * memory.element_size()
    return [block * block_bytes + offset * position_bytes for block, offset in places.spots]


def check_places(source: Places, target: Places, tokens: int) -> None:
    """That both sides have the same units, heads and layers, and that every unit is inside.

    Raises:
        InvariantBroken: they have not, or one is not.
    """
    there, here = source.memory_UHL2SR, target.memory_UHL2SR
    if there.shape[1:4] != here.shape[1:4] or len(source.spots) != len(target.spots):
        raise InvariantBroken(
            f"{len(source.spots)} units of {tuple(there.shape[1:4])} cannot be copied to "
            f"{len(target.spots)} of {tuple(here.shape[1:4])}"
        )
    for places in (source, target):
        _check_spots(places, tokens)


def _check_spots(places: Places, tokens: int) -> None:
    memory, spots = places.memory_UHL2SR, places.spots
    plane, row = memory.stride(3), memory.shape[5]
    if memory.stride()[2:] != (2 * plane, plane, row, 1):
        raise InvariantBroken("rows, and K and V of the layers, must lie one behind the other")
    last = memory.shape[4] - tokens
    for block, offset in spots:
        if not (0 <= block < memory.shape[0] and 0 <= offset <= last):
            raise InvariantBroken(
                f"positions {offset} to {offset + tokens} of block {block} lie outside a cache of "
                f"{memory.shape[0]} blocks of {memory.shape[4]}"
            )
