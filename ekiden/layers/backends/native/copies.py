"""Many boxes of bytes copied or converted by one call, on the caller's thread (``src/boxes.h``).

Addresses, offsets, strides and sizes are in bytes, and nobody checks them here. The GIL is
released. Source and target must not overlap.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch

from ekiden.core.errors import InvariantBroken
from ekiden.layers.backends.native.library import load

ROW_FORMATS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}
"""Of KV rows, by the number in ``src/convert.cpp``; bytes have a float32 scale behind a row."""
MOST_NUMBERS = 2048
"""Of a row that can be converted."""


class Axis(ctypes.Structure):
    """``count`` pieces, so far apart in the source and in the target."""

    _fields_ = (("count", c_int64), ("source", c_int64), ("target", c_int64))


class _Boxes(ctypes.Structure):
    _fields_ = (
        ("source", c_void_p),
        ("source_offsets", c_void_p),
        ("target", c_void_p),
        ("target_offsets", c_void_p),
        ("count", c_int64),
        ("heads", Axis),
        ("planes", Axis),
    )


class Boxes:
    """The i-th box goes from ``source + source_offsets[i]`` to ``target + target_offsets[i]``; it
    is [heads, planes] pieces, a plane being K or V of one layer."""

    def __init__(
        self,
        source: int,
        source_offsets: Sequence[int],
        target: int,
        target_offsets: Sequence[int],
        heads: Axis,
        planes: Axis,
    ) -> None:
        # Kept, since the structure only has their addresses.
        self._offsets = array("q", source_offsets), array("q", target_offsets)
        there, here = (offsets.buffer_info() for offsets in self._offsets)
        count = min(there[1], here[1])
        self._boxes = _Boxes(source, there[0], target, here[0], count, heads, planes)

    def copy(self, piece: int, *, streamed: bool) -> None:
        """``piece``: what lies together on both sides. ``streamed``: write past the cache, for a
        target that is not read soon.

        Raises:
            NativeUnavailable: there is no library on this machine.
        """
        load().ekiden_copy_boxes(ctypes.byref(self._boxes), piece, streamed)

    def convert(self, rows: int, width: int, source: torch.dtype, target: torch.dtype) -> None:
        """Every piece is ``rows`` rows of ``width`` numbers, kept as KV dtypes keep them.

        Raises:
            InvariantBroken: a width that is not 1 to ``MOST_NUMBERS``.
            KeyError: a dtype that KV does not have.
            NativeUnavailable: there is no library on this machine.
        """
        formats = ROW_FORMATS[source], ROW_FORMATS[target]
        if load().ekiden_convert_boxes(ctypes.byref(self._boxes), rows, width, *formats):
            raise InvariantBroken(f"rows of {width} numbers cannot be converted")
