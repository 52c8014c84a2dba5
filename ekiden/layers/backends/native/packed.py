"""Weights as the kernels want them, and the operations that multiply by them.

Panels are 32 outputs wide (``src/panels.h``); one packed copy serves every number of rows.
Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ekiden.layers.backends.native.library import Kind, Op, load, op
from ekiden.layers.backends.native.memory import allocate

PANEL = 32


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
    weight_NK: Tensor, scale_N: Tensor | None = None, *, dtype: torch.dtype | None = None
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
    panels = allocate(-(-outputs // PANEL) * -(-inputs // pair) * PANEL * 4)
    load().ekiden_pack_dense(
        weight_NK.data_ptr(), panels.data_ptr(), outputs, inputs, weight_NK.stride(0), pair
    )
    return PackedDense(
        outputs=outputs, inputs=inputs, dtype=dtype, panels=panels, scale=_float(scale_N)
    )


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
