"""Many boxes of bytes copied by one call (``src/copies.cpp``), on the caller's thread."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int64

from ekiden.layers.backends.native.library import load


def copy_boxes(
    source: int,
    source_offsets: Sequence[int],
    target: int,
    target_offsets: Sequence[int],
    axes: Sequence[tuple[int, int, int]],
    piece: int,
    *,
    streamed: bool,
) -> None:
    """Copy the i-th box from ``source + source_offsets[i]`` to ``target + target_offsets[i]``.

    Everything is in bytes, and nobody checks it. ``axes``: (count, stride of the source, stride of
    the target) of the outer and of the inner one; ``piece``: what lies together. ``streamed``:
    write past the cache, for a target that is not read soon. The GIL is released; source and target
    must not overlap.

    Raises:
        NativeUnavailable: there is no library on this machine.
    """
    from_at, to_at = array("q", source_offsets), array("q", target_offsets)
    flat = [number for axis in axes for number in axis]
    load().ekiden_copy_boxes(
        source,
        from_at.buffer_info()[0],
        target,
        to_at.buffer_info()[0],
        min(len(from_at), len(to_at)),
        (c_int64 * 6)(*flat),
        piece,
        streamed,
    )
