"""Weights as the kernels want them, and the operations that multiply by them.

Panels are 32 outputs wide (``src/panels.h``); one packed copy serves every number of rows.
Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ekiden.layers.backends.native.library import Kind, Op, load, op
from ekiden.layers.backends.native.memory import allocate
from ekiden.layers.weights import DenseWeight, LinearWeight

PANEL = 32
MAX_GROUP = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedDense:
    """A matrix [outputs, inputs] in panels of bfloat16 or float32 (``dtype``)."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    panels: Tensor
    """uint8, the bytes of the panels."""
    scale: Tensor | None
    """float32 [outputs], multiplies each output's sum."""


def pack_dense(
    weight_NK: Tensor,
    scale_N: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    threads: int = 1,
) -> PackedDense:
    """Pack a matrix for activations of ``dtype`` (the weight's own if None).

    A float8 weight becomes bfloat16 exactly; its ``scale_N`` is applied to the float32 sums.

    Raises:
        ValueError: a dtype other than bfloat16 or float32.
    """
    dtype = dtype or weight_NK.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype must be bfloat16 or float32 for native kernels, not {dtype}")
    weight_NK = weight_NK.to(dtype)
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    outputs, inputs = weight_NK.shape
    pair = 2 if dtype == torch.bfloat16 else 1
    panel_bytes = -(-inputs // pair) * PANEL * 4
    panels = allocate(-(-outputs // PANEL) * panel_bytes)
    row_bytes = weight_NK.stride(0) * weight_NK.element_size()
    rows = -(-outputs // (threads * PANEL)) * PANEL

    def pack(first: int) -> None:
        load().ekiden_pack_dense(
            weight_NK.data_ptr() + first * row_bytes,
            panels.data_ptr() + first // PANEL * panel_bytes,
            min(rows, outputs - first),
            inputs,
            weight_NK.stride(0),
            pair,
        )

    # Most of the time goes into pages that are touched for the first time, of the file and of ours.
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(pack, range(0, outputs, rows)):
            pass
    return PackedDense(
        outputs=outputs, inputs=inputs, dtype=dtype, panels=panels, scale=_float(scale_N)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedQuantised:
    """A matrix [outputs, inputs] of 4- or 8-bit weights, with its groups' scales, in panels."""

    outputs: int
    inputs: int
    bits: int
    group: int
    """Weights along a row that share a scale where the kernel is concerned, 8 to 128."""
    zeros: bool
    """Whether groups have zero points; else every one is the middle, 8 or 128."""
    panels: Tensor
    """uint8, the bytes of the panels."""


def pack_quantised(
    q_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor | None, *, bits: int, group_size: int
) -> PackedQuantised:
    """Pack a matrix whose weights are ``scales[n, g] * (q[n, k] - zeros[n, g])``, g = k // group.

    ``q_NK`` uint8 below 2 ** bits; ``zeros_NG`` uint8, None for 2 ** (bits - 1) everywhere. G is
    the number of groups, the last of which may be short; one group may hold the whole row.

    Raises:
        ValueError: bits other than 4 and 8, a group that divides no multiple of 128, other shapes
            or dtypes.
    """
    outputs, inputs = q_NK.shape
    group = min(group_size, MAX_GROUP)
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    if group_size < 8 or group % 8 or (group_size % MAX_GROUP and MAX_GROUP < group_size < inputs):
        raise ValueError(
            f"group_size must be a multiple of 8 up to 128, one of 128, or at least the row's "
            f"{inputs}, not {group_size}"
        )
    groups = -(-inputs // group_size)
    for name, tensor in (("scales", scales_NG), ("zeros", zeros_NG)):
        if tensor is not None and tensor.shape != (outputs, groups):
            raise ValueError(f"{name} must be [{outputs}, {groups}], not {list(tensor.shape)}")
    if q_NK.dtype != torch.uint8 or (zeros_NG is not None and zeros_NG.dtype != torch.uint8):
        raise ValueError("weights and zero points must be uint8")
    # A longer group is several of the kernel's, alike.
    spread_G = torch.arange(-(-inputs // group)) * group // group_size
    scales = scales_NG.to(torch.float32)[:, spread_G].contiguous()
    zeros = None if zeros_NG is None else zeros_NG[:, spread_G].contiguous()
    q_NK = q_NK.contiguous()
    library = load()
    panels = allocate(
        library.ekiden_quantised_bytes(outputs, inputs, group, bits, int(zeros is not None))
    )
    library.ekiden_pack_quantised(
        q_NK.data_ptr(),
        scales.data_ptr(),
        _address(zeros),
        panels.data_ptr(),
        outputs,
        inputs,
        group,
        bits,
    )
    return PackedQuantised(
        outputs=outputs,
        inputs=inputs,
        bits=bits,
        group=group,
        zeros=zeros is not None,
        panels=panels,
    )


def packed_bytes(weight: LinearWeight, dtype: torch.dtype) -> int:
    """Bytes of a matrix once it is packed for activations of ``dtype``; its numbers are not read.

    Zero points are counted where they may turn out to be all alike, and then not kept.
    """
    (outputs, inputs), panels = weight.shape, -(-weight.shape[0] // PANEL)
    if isinstance(weight, DenseWeight):
        pair = 2 if dtype == torch.bfloat16 else 1
        scale = 0 if weight.scale is None else 4 * outputs
        return panels * -(-inputs // pair) * PANEL * 4 + scale
    group = min(weight.group_size if weight.scales.shape[1] > 1 else inputs, MAX_GROUP)
    header = PANEL * 4 + 2 * PANEL
    numbers = -(-inputs // 8) * weight.bits * PANEL
    return panels * (-(-inputs // group) * header + numbers)


def linear_op(packed: PackedDense, x_MK: Tensor, y_MN: Tensor, bias_N: Tensor | None = None) -> Op:
    """``y = (x @ w.T) * scale + bias``, accumulated in float32.

    ``x_MK`` is of the packed dtype, ``y_MN`` of the same or float32, ``bias_N`` float32; rows may
    be apart, elements of a row may not. The tensors must outlive the operation.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit.
    """
    _check(x_MK, y_MN, bias_N, packed.outputs, packed.inputs)
    if x_MK.dtype != packed.dtype:
        raise ValueError(f"x is {x_MK.dtype}, the weights were packed for {packed.dtype}")
    return op(
        Kind.LINEAR,
        x_MK.dtype,
        [
            x_MK.data_ptr(),
            packed.panels.data_ptr(),
            y_MN.data_ptr(),
            _address(bias_N),
            _address(packed.scale),
        ],
        _numbers(x_MK, y_MN, packed.outputs, packed.inputs),
    )


def quantised_linear_op(
    packed: PackedQuantised, x_MK: Tensor, y_MN: Tensor, bias_N: Tensor | None = None
) -> Op:
    """``y = x @ w.T + bias``; x counts to 2 ** -16 of the largest of each group of a row.

    ``x_MK`` is bfloat16 or float32; all else as ``linear_op``.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit.
    """
    _check(x_MK, y_MN, bias_N, packed.outputs, packed.inputs)
    return op(
        Kind.QUANTISED_LINEAR,
        x_MK.dtype,
        [x_MK.data_ptr(), packed.panels.data_ptr(), y_MN.data_ptr(), _address(bias_N)],
        [
            *_numbers(x_MK, y_MN, packed.outputs, packed.inputs),
            packed.bits,
            packed.group,
            int(packed.zeros),
        ],
    )


def _check(x_MK: Tensor, y_MN: Tensor, bias_N: Tensor | None, outputs: int, inputs: int) -> None:
    rows = x_MK.shape[0]
    if x_MK.shape != (rows, inputs) or y_MN.shape != (rows, outputs):
        raise ValueError(
            f"x {list(x_MK.shape)} and y {list(y_MN.shape)} do not fit weights "
            f"[{outputs}, {inputs}]"
        )
    if (inputs > 1 and x_MK.stride(1) != 1) or (outputs > 1 and y_MN.stride(1) != 1):
        raise ValueError("the elements of a row of x or y do not lie side by side")
    if y_MN.dtype not in (x_MK.dtype, torch.float32):
        raise ValueError(f"y must be {x_MK.dtype} or float32, not {y_MN.dtype}")
    if bias_N is not None and (bias_N.shape != (outputs,) or bias_N.dtype != torch.float32):
        raise ValueError(f"bias must be float32 [{outputs}], not {bias_N.dtype} {bias_N.shape}")


def _numbers(x_MK: Tensor, y_MN: Tensor, outputs: int, inputs: int) -> list[int]:
    float_out = y_MN.dtype == torch.float32
    return [x_MK.shape[0], outputs, inputs, x_MK.stride(0), y_MN.stride(0), int(float_out)]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _float(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to(torch.float32).contiguous()
