"""KV that prefill keeps in one dtype and decode in another: converted where it is written.

What arrives is what decode's own kernels would have written of the same numbers, to the bit: floats
are rounded to the nearest (halves to even); quantised rows are read as float32 first.

Legend of shapes: as in ``boxes.py``; T tokens of a unit.
"""

from __future__ import annotations

import torch

from ekiden.cache.layout import SCALE_BYTES
from ekiden.cache.scaled import LARGEST, pack_rows
from ekiden.cache.tensors import KV_TORCH_DTYPES, as_numbers, as_stored
from ekiden.core.errors import InvariantBroken, SetupError
from ekiden.layers.backends.native.copies import MOST_NUMBERS
from kv_transfer.boxes import check_places, copy_units, native_boxes, use_native
from kv_transfer.places import Places

CHUNK_BYTES = 1 << 20
"""Converted at once, or one unit: what is made of it stays in the processor's cache."""


def kv_dtype(name: str) -> torch.dtype:
    """The torch dtype of a KV dtype that a peer named.

    Raises:
        SetupError: there is none of that name.
    """
    try:
        return KV_TORCH_DTYPES[name]
    except KeyError:
        known = ", ".join(KV_TORCH_DTYPES)
        raise SetupError(f"KV dtype {name} cannot be converted: use one of {known}") from None


def row_width(cache_BHL2SR: torch.Tensor, dtype: torch.dtype) -> int:
    """Elements of a row of this cache if it were of ``dtype``."""
    head_dim = cache_BHL2SR.shape[-1] - _scale_width(cache_BHL2SR.dtype)
    return head_dim + _scale_width(dtype)


def _scale_width(dtype: torch.dtype) -> int:
    return SCALE_BYTES if dtype in LARGEST else 0


def convert_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [..., R] of a cache of their dtype as rows [..., R'] of a cache of ``dtype``."""
    kind, stored = rows.dtype, as_stored(rows)
    if dtype not in LARGEST:
        return as_numbers(stored, kind, dtype)
    return pack_rows(as_numbers(stored, kind, torch.float32), dtype).view(dtype)


def copy_converted(source: Places, target: Places, tokens: int) -> None:
    """As ``copy_units``, between memories of any two KV dtypes; the target is not read soon.

    Raises:
        InvariantBroken: the two sides do not match, or a unit lies outside its memory.
    """
    there, here = source.memory_UHL2SR, target.memory_UHL2SR
    if there.dtype == here.dtype:
        copy_units(source, target, tokens, streamed=True)
        return
    check_places(source, target, tokens)
    if there.shape[5] != row_width(here, there.dtype):
        raise InvariantBroken(
            f"rows of {there.shape[5]} {there.dtype} cannot become rows of {here.shape[5]} "
            f"{here.dtype}"
        )
    if use_native(source, target) and row_width(here, torch.float32) <= MOST_NUMBERS:
        convert_native(source, target, tokens)
    else:
        convert_by_torch(source, target, tokens)


def convert_native(source: Places, target: Places, tokens: int) -> None:
    """Without any check: row by row, straight from one memory to the other."""
    there, here = source.memory_UHL2SR, target.memory_UHL2SR
    width = row_width(here, torch.float32)
    native_boxes(source, target).convert(tokens, width, there.dtype, here.dtype)


def convert_by_torch(source: Places, target: Places, tokens: int) -> None:
    """The slow reference; on any device. Some units at once, by way of memory of its own."""
    for first in range(0, len(source.spots), step := _units_at_once(source, tokens)):
        part = slice(first, first + step)
        rows_UHL2TR = convert_rows(_packed(source, part, tokens), target.memory_UHL2SR.dtype)
        packed = Places(rows_UHL2TR, [(unit, 0) for unit in range(len(rows_UHL2TR))])
        copy_units(packed, target._replace(spots=target.spots[part]), tokens)


def _units_at_once(places: Places, tokens: int) -> int:
    _, heads, layers, two, _, row = places.memory_UHL2SR.shape
    unit = heads * layers * two * tokens * row * places.memory_UHL2SR.element_size()
    return max(CHUNK_BYTES // max(unit, 1), 1)


def _packed(places: Places, part: slice, tokens: int) -> torch.Tensor:
    """Some units one behind the other, [units, heads, layers, 2, tokens, row]."""
    memory, spots = places.memory_UHL2SR, places.spots[part]
    _, heads, layers, two, _, row = memory.shape
    shape = (len(spots), heads, layers, two, tokens, row)
    packed = torch.empty(shape, dtype=memory.dtype, device=memory.device)
    whole = Places(packed, [(unit, 0) for unit in range(len(spots))])
    copy_units(places._replace(spots=spots), whole, tokens)
    return packed
