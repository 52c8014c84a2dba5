"""One matrix, in the form in which the device multiplies fastest by it.

Float matrices go to cuBLAS; quantised ones stay small and go to ``quant``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.backends.triton import quant
from ekiden.layers.quantised import dequantise
from ekiden.layers.weights import GroupedWeight, LinearWeight

logger = logging.getLogger(__name__)

Linear = Callable[[Tensor], Tensor]


def make_linear(weight: LinearWeight, bias: Tensor | None, *, float_out: bool) -> Linear:
    """As ``ekiden.layers.ops.Ops.linear``."""
    if isinstance(weight, GroupedWeight):
        outputs, inputs = weight.shape
        if quant.takes_groups(inputs, weight.scales.shape[1]):
            return GroupedLinear(weight, bias, float_out)
        logger.warning(
            "a matrix of %d x %d with a scale for every %d inputs is multiplied in float: the "
            "kernels take groups of a multiple of 32",
            outputs,
            inputs,
            weight.group_size,
        )
        return FloatLinear(dequantise(weight), bias, float_out)
    if weight.scale is None:
        return FloatLinear(weight.values, bias, float_out)
    if weight.values.dtype == torch.float8_e4m3fn:
        return E4m3Linear(weight.values, weight.scale, bias, float_out)
    return FloatLinear(dequantise(weight), bias, float_out)


class FloatLinear:
    """A matrix in the dtype of its input; another is turned into it at its first use."""

    def __init__(self, values: Tensor, bias: Tensor | None, float_out: bool) -> None:
        self.values = values
        self.bias = bias
        self.float_out = float_out

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self.values.dtype != x_TI.dtype:
            self.values = self.values.to(x_TI.dtype)
        if self.bias is not None and self.bias.dtype != x_TI.dtype:
            self.bias = self.bias.to(x_TI.dtype)
        out_TO = F.linear(x_TI, self.values, self.bias)
        return out_TO.float() if self.float_out else out_TO


class E4m3Linear:
    """An e4m3 matrix with one scale an output."""

    def __init__(
        self, values: Tensor, scale_O: Tensor, bias: Tensor | None, float_out: bool
    ) -> None:
        self.values = values
        self.scale_O1 = scale_O[:, None].contiguous()
        self.bias = bias
        self.float_out = float_out

    def __call__(self, x_TI: Tensor) -> Tensor:
        out_dtype = torch.float32 if self.float_out else x_TI.dtype
        return quant.quant_linear(
            x_TI, self.values, self.scale_O1, None, self.bias, kind=quant.FP8, out_dtype=out_dtype
        )


class GroupedLinear:
    """Whole numbers of 8 or 4 bits with a scale and a zero for each group of inputs."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, float_out: bool) -> None:
        four = weight.bits == 4
        self.kind = quant.INT4 if four else quant.INT8
        self.values = pack_pairs(weight.values) if four else weight.values
        self.scales_OG = weight.scales
        self.zeros_OG = weight.zeros
        self.order = weight.order
        self.bias = bias
        self.float_out = float_out

    def __call__(self, x_TI: Tensor) -> Tensor:
        x_TI = x_TI if self.order is None else x_TI.index_select(1, self.order)
        out_dtype = torch.float32 if self.float_out else x_TI.dtype
        return quant.quant_linear(
            x_TI,
            self.values,
            self.scales_OG,
            self.zeros_OG,
            self.bias,
            kind=self.kind,
            out_dtype=out_dtype,
        )


def pack_pairs(values_OI: Tensor) -> Tensor:
    """uint8 [O, I] below 16 as [O, I / 2], the even column in the low half of a byte."""
    return values_OI[:, ::2] | (values_OI[:, 1::2] << 4)
