"""Products with quantised weights: only the weights are small, the arithmetic is the model's.

Three kinds of weight, all ``[out, in]`` with rows that lie together:

- int8: a byte q, value ``(q - zero) * scale``;
- int4: two values a byte, the even column in the low half, else as int8;
- fp8: an e4m3 byte, value ``e4m3 * scale``.

Whole numbers up to 255 and e4m3 are exact in bfloat16 and float16, so a tile is multiplied as it
is, and the scale of its group of columns is put on the float32 product.

Shapes: T rows, I inputs, O outputs, G groups of inputs (1 for a scale a row).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ekiden.layers.backends.triton import kv
from ekiden.layers.backends.triton.decode import multiprocessors

INT8, INT4, FP8 = 0, 1, 2
_INT4, _FP8 = tl.constexpr(INT4), tl.constexpr(FP8)
_MOST_SPLITS = 16


def quant_linear(
    x_TI: Tensor, weight: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None, bias_O: Tensor | None,
    *, kind: int, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """``x @ dequantised(weight).T + bias``, [T, O] in ``out_dtype`` or x's, summed in float32.

    ``weight`` is uint8 [O, I] (int4: [O, I / 2]), or the same bytes as int8 or float8_e4m3fn;
    ``scales_OG`` any float dtype, ``zeros_OG`` uint8 or None for 0 (fp8 has none). A group is
    I / G inputs, a multiple of 32, unless G is 1.

    Raises:
        ValueError: groups of another size, or shapes that do not match.
    """
    rows, inputs = x_TI.shape
    outputs, groups = scales_OG.shape
    tile = _tile(inputs, groups, most=128 if rows <= 64 else 64)
    if weight.shape != (outputs, inputs // 2 if kind == INT4 else inputs):
        raise ValueError(f"a weight of {tuple(weight.shape)} does not take {inputs} inputs")
    block_rows = min(128, max(16, triton.next_power_of_2(rows)))
    block_outputs = 128 if rows > 64 else 32
    tiles = triton.cdiv(rows, block_rows) * triton.cdiv(outputs, block_outputs)
    splits = choose_splits(tiles, triton.cdiv(inputs, tile), x_TI.device)
    out_dtype = out_dtype or x_TI.dtype
    whole = splits == 1 and bias_O is None
    dtype = out_dtype if whole else torch.float32
    out = torch.empty((splits, rows, outputs), dtype=dtype, device=x_TI.device)
    _quant_linear[(triton.cdiv(outputs, block_outputs), triton.cdiv(rows, block_rows), splits)](
        x_TI, weight.view(torch.uint8), scales_OG, scales_OG if zeros_OG is None else zeros_OG, out,
        rows, outputs, inputs, x_TI.stride(0), weight.stride(0), inputs // groups, KIND=kind,
        ZEROS=zeros_OG is not None, ONE_GROUP=groups == 1, GROUPS=groups, SPLITS=splits,
        ROWS=block_rows, OUTPUTS=block_outputs, TILE=tile, EXACT=x_TI.dtype == torch.float32,
        num_warps=8 if block_rows >= 64 else 4, num_stages=3,
    )  # fmt: skip
    if whole:
        return out[0]
    total_TO = out.sum(0) if splits > 1 else out[0]
    return (total_TO if bias_O is None else total_TO + bias_O.float()).to(out_dtype)


def choose_splits(tiles: int, turns: int, device: torch.device) -> int:
    """Programs that share one output tile, each with some of the ``turns`` along the inputs."""
    wanted = -(-2 * multiprocessors(device) // tiles)
    return max(1, min(wanted, turns // 4, _MOST_SPLITS))


def _tile(inputs: int, groups: int, most: int) -> int:
    """Inputs of one turn: within one group."""
    if groups == 1:
        return min(most, max(32, int(triton.next_power_of_2(inputs))))
    if not takes_groups(inputs, groups):
        raise ValueError(f"{groups} groups of {inputs} inputs: a group must be a multiple of 32")
    size = inputs // groups
    return min(most, size & -size)  # the largest power of two that divides it


def takes_groups(inputs: int, groups: int) -> bool:
    """Whether ``quant_linear`` can multiply by a matrix with so many groups."""
    return groups == 1 or (inputs % groups == 0 and inputs // groups % 32 == 0)


# A count that changes from step to step would else be compiled anew for 1 and multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def _quant_linear(
    x_ptr, weight_ptr, scales_ptr, zeros_ptr, out_ptr, rows, outputs, inputs, x_row, weight_row,
    group, KIND: tl.constexpr, ZEROS: tl.constexpr, ONE_GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    out_columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    columns_real, rows_real = out_columns < outputs, row < rows
    share = tl.cdiv(tl.cdiv(inputs, TILE), SPLITS) * TILE
    begin = split * share
    end = tl.minimum(begin + share, inputs)
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_row
    weight_rows = weight_ptr + out_columns.to(tl.int64)[:, None] * weight_row
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(begin, end, TILE):
        group_at = 0 if ONE_GROUP else start // group
        grouped = out_columns * GROUPS + group_at
        zero = tl.zeros((OUTPUTS,), tl.int32)
        if ZEROS:
            zero = tl.load(zeros_ptr + grouped, mask=columns_real, other=0).to(tl.int32)
        if KIND == _INT4:
            part = _pairs_product(
                x_rows, weight_rows, zero, start, inputs, rows_real, columns_real, TILE, EXACT
            )
        else:
            part = _bytes_product(
                x_rows, weight_rows, zero, start, inputs, rows_real, columns_real, KIND, TILE, EXACT
            )
        scale = tl.load(scales_ptr + grouped, mask=columns_real, other=0.0).to(tl.float32)
        acc += part * scale[None, :]
    places = (split * rows + row).to(tl.int64)[:, None] * outputs + out_columns[None, :]
    mask = rows_real[:, None] & columns_real[None, :]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bytes_product(
    x_rows, weight_rows, zero, start, inputs, rows_real, columns_real, KIND: tl.constexpr,
    TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """x tile times weight tile, the weights whole numbers or e4m3 without their scale."""
    column = start + tl.arange(0, TILE)
    real = (column < inputs)[None, :]
    bytes_ = tl.load(weight_rows + column[None, :], mask=columns_real[:, None] & real, other=0)
    x = tl.load(x_rows + column[None, :], mask=rows_real[:, None] & real, other=0.0)
    if KIND == _FP8:
        weight = kv.decode_e4m3(bytes_).to(x.dtype)
    else:
        weight = _exact(bytes_.to(tl.int32) - zero[:, None], x.dtype)
    return tl.dot(x, tl.trans(weight), input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _pairs_product(
    x_rows, weight_rows, zero, start, inputs, rows_real, columns_real, TILE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The same of int4: even columns times low halves, odd columns times high ones."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    byte = start // 2 + tl.arange(0, TILE // 2)
    real = (byte < inputs // 2)[None, :]
    pair = tl.load(weight_rows + byte[None, :], mask=columns_real[:, None] & real, other=0)
    low = _exact((pair & 15).to(tl.int32) - zero[:, None], x_rows.dtype.element_ty)
    high = _exact((pair >> 4).to(tl.int32) - zero[:, None], x_rows.dtype.element_ty)
    x_mask = rows_real[:, None] & real
    even = tl.load(x_rows + 2 * byte[None, :], mask=x_mask, other=0.0)
    odd = tl.load(x_rows + 2 * byte[None, :] + 1, mask=x_mask, other=0.0)
    part = tl.dot(even, tl.trans(low), input_precision=precision)
    return tl.dot(odd, tl.trans(high), part, input_precision=precision)


@triton.jit
def _exact(whole, dtype: tl.constexpr):
    """A small whole number in a float dtype that holds it exactly."""
    return whole.to(tl.float32).to(dtype)
