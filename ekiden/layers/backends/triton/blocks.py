"""Blocks of the cache gathered into one contiguous piece, and put back: staging for transfers.

Shapes: n blocks; a part of the cache is ``[blocks, heads, layers, X]``, X = 2 * B * row elements
that lie together. Heads and layers may be a range of the rank's own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 2048


def gather_blocks(part: Tensor, blocks_n: Tensor, out: Tensor) -> None:
    """``out[i] = part[blocks_n[i]]``; ``out [n, heads, layers, 2, B, row]`` is contiguous.

    ``part`` is the cache, or a range of its heads and layers, read in place.

    Raises:
        ValueError: the shapes or dtypes do not match, or the layout of ``part`` is another.
    """
    _launch(part, blocks_n, out, scatter=False)


def scatter_blocks(staged: Tensor, blocks_n: Tensor, part: Tensor) -> None:
    """``part[blocks_n[i]] = staged[i]``: the way back. Block ids must differ. Raises as above."""
    _launch(part, blocks_n, staged, scatter=True)


def _launch(part: Tensor, blocks_n: Tensor, flat: Tensor, *, scatter: bool) -> None:
    count = blocks_n.shape[0]
    _, heads, layers, two, size, width = part.shape
    if flat.shape != (count, *part.shape[1:]) or flat.dtype != part.dtype:
        raise ValueError(
            f"{count} blocks of {tuple(part.shape[1:])} {part.dtype} do not fit into "
            f"{tuple(flat.shape)} {flat.dtype}"
        )
    if part.stride()[3:] != (size * width, width, 1) or not flat.is_contiguous():
        raise ValueError("blocks are gathered from [.., 2, block_size, row] that lies together")
    length = two * size * width
    _copy_blocks[(count, heads * layers, triton.cdiv(length, _WIDTH))](
        part, blocks_n, flat, part.stride(0), part.stride(1), part.stride(2), layers, length,
        SCATTER=scatter, WIDTH=_WIDTH, num_warps=4,
    )  # fmt: skip


@triton.jit
def _copy_blocks(
    part_ptr, blocks_ptr, flat_ptr, part_block, part_head, part_layer, layers, length,
    SCATTER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    item, plane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = places < length
    block = tl.load(blocks_ptr + item).to(tl.int64)
    in_cache = block * part_block + (plane // layers).to(tl.int64) * part_head
    in_cache += (plane % layers).to(tl.int64) * part_layer
    in_flat = (item * tl.num_programs(1) + plane) * length
    if SCATTER:
        value = tl.load(flat_ptr + in_flat + places, mask=real)
        tl.store(part_ptr + in_cache + places, value, mask=real)
    else:
        value = tl.load(part_ptr + in_cache + places, mask=real)
        tl.store(flat_ptr + in_flat + places, value, mask=real)
