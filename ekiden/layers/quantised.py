"""Matrices of small numbers: made from float ones, cut for a rank, and turned back.

Rounding is to the nearest. How far a group's scale is drawn in below its largest element (so that
the others are rounded finer) is found by trying: the squared error of the group decides, as in
OMSE (arXiv:1902.06822) and AWQ's clipping (arXiv:2306.00978), without data.

Shapes: O outputs, I inputs, G groups of S inputs each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.core.errors import SetupError
from ekiden.layers.weights import DenseWeight, GroupedWeight, LinearWeight, Range

GROUP_SIZES = (128, 64, 32)
"""Inputs of a group, best first; a matrix that none of them divides has one scale an output."""
E4M3_LARGEST = 448.0
_AT_ONCE = 1 << 16
"""Elements quantised at once, so that what lies between stays in the processor's cache."""


class Scheme(NamedTuple):
    """How numbers of so many bits are used."""

    first: int
    last: int
    centre: int | None
    """The zero of every group; None: each has its own."""
    clips: tuple[float, ...]
    """What the range is drawn in by, tried in order. A step of 8 bits is too fine for it to pay."""


_SCHEMES = {
    8: Scheme(1, 255, 128, (1.0,)),
    4: Scheme(0, 15, None, (1.0, 0.95, 0.9, 0.85, 0.8)),
}


def group_size(inputs: int, sizes: Sequence[int] = GROUP_SIZES) -> int:
    """The first of ``sizes`` that divides ``inputs``, else all of them."""
    return next((size for size in sizes if inputs % size == 0), inputs)


def quantise(weight_OI: Tensor, bits: int, size: int) -> GroupedWeight:
    """A float matrix in whole numbers of 8 bits (symmetric) or 4 (with a zero point).

    Scales are numbers that float16 holds, so a kernel may keep them so.
    """
    outputs, inputs = weight_OI.shape
    step = outputs if weight_OI.is_meta else max(1, _AT_ONCE // inputs)
    parts = [
        _quantise_groups(_grouped(weight_OI[row : row + step], size), _SCHEMES[bits])
        for row in range(0, outputs, step)
    ]
    values, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return GroupedWeight(
        values=values.flatten(1), scales=scales, zeros=zeros, bits=bits, group_size=size
    )


def quantise_e4m3(weight_OI: Tensor) -> DenseWeight:
    """A float matrix in 8-bit floats (4 exponent bits, 3 of fraction), one scale an output."""
    scale_O1 = weight_OI.float().abs().amax(1, keepdim=True) / E4M3_LARGEST
    values = weight_OI.float() / scale_O1.masked_fill(scale_O1 == 0, 1.0)
    return DenseWeight(values=values.to(torch.float8_e4m3fn), scale=scale_O1.squeeze(1))


def dequantise(weight: LinearWeight) -> Tensor:
    """The matrix [O, I] in float32, inputs in their own order: what every kernel multiplies by."""
    if isinstance(weight, DenseWeight):
        values = weight.values.float()
        return values if weight.scale is None else values * weight.scale[:, None]
    grouped = _grouped(weight.values, weight.group_size)
    matrix = ((grouped - weight.zeros[..., None]) * weight.scales[..., None]).flatten(1)
    return matrix if weight.order is None else matrix[:, weight.order.argsort()]


def cut_columns(weight: GroupedWeight, columns: Range, what: str) -> GroupedWeight:
    """Inputs [start, stop) of a matrix. Borders inside a group make smaller groups.

    Raises:
        SetupError: the groups would be too small for the kernels; ``what`` names the matrix.
    """
    start, stop = columns
    if weight.group_size == weight.shape[1]:
        size, repeat, groups = stop - start, 1, slice(None)
    else:
        size = math.gcd(weight.group_size, start, stop)
        least = min(GROUP_SIZES[-1], weight.group_size)
        if size < least or size % 8:
            raise SetupError(
                f"{what} has a scale for every {weight.group_size} inputs, and this rank's inputs "
                f"{start} to {stop - 1} do not keep at least {least} of them together: "
                "choose a --tensor-parallel-size that divides them"
            )
        repeat, groups = weight.group_size // size, slice(start // size, stop // size)
    return GroupedWeight(
        values=weight.values[:, start:stop].contiguous(),
        scales=weight.scales.repeat_interleave(repeat, 1)[:, groups].contiguous(),
        zeros=weight.zeros.repeat_interleave(repeat, 1)[:, groups].contiguous(),
        bits=weight.bits,
        group_size=size,
    )


def _grouped(x_OI: Tensor, size: int) -> Tensor:
    """[O, G, S] in float32."""
    return x_OI.reshape(x_OI.shape[0], -1, size).float()


def _quantise_groups(x_OGS: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """values uint8 [O, G, S], scales float32 [O, G], zeros uint8 [O, G]."""
    low_OG, high_OG = _range(x_OGS, scheme)
    scale_OG, zero_OG = _scale(low_OG, high_OG, scheme)
    if len(scheme.clips) > 1:
        scratch_OGS = torch.empty_like(x_OGS)
        least_OG = _error(x_OGS, scale_OG, zero_OG, scheme, scratch_OGS)
        for clip in scheme.clips[1:]:
            tried = _scale(low_OG * clip, high_OG * clip, scheme)
            error_OG = _error(x_OGS, *tried, scheme, scratch_OGS)
            better_OG = error_OG < least_OG
            least_OG = torch.minimum(error_OG, least_OG)
            scale_OG = torch.where(better_OG, tried[0], scale_OG)
            zero_OG = torch.where(better_OG, tried[1], zero_OG)
    values_OGS = _round(x_OGS, scale_OG, zero_OG, scheme, torch.empty_like(x_OGS))
    return values_OGS.to(torch.uint8), scale_OG, zero_OG.to(torch.uint8)


def _range(x_OGS: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    if scheme.centre is None:
        return x_OGS.amin(-1).clamp_(max=0), x_OGS.amax(-1).clamp_(min=0)
    largest_OG = x_OGS.abs().amax(-1)
    return -largest_OG, largest_OG


def _scale(low_OG: Tensor, high_OG: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """(scale, zero), float32."""
    scale_OG = _as_float16((high_OG - low_OG) / (scheme.last - scheme.first))
    if scheme.centre is not None:
        return scale_OG, torch.full_like(scale_OG, scheme.centre)
    zero_OG = (-low_OG * _inverse(scale_OG)).round_().clamp_(scheme.first, scheme.last)
    return scale_OG, zero_OG


def _round(
    x_OGS: Tensor, scale_OG: Tensor, zero_OG: Tensor, scheme: Scheme, out_OGS: Tensor
) -> Tensor:
    """The numbers that stand for x, still as floats, in ``out_OGS``."""
    inverse_OG1 = _inverse(scale_OG)[..., None]
    torch.addcmul(zero_OG[..., None], x_OGS, inverse_OG1, out=out_OGS)
    return out_OGS.round_().clamp_(scheme.first, scheme.last)


def _error(
    x_OGS: Tensor, scale_OG: Tensor, zero_OG: Tensor, scheme: Scheme, scratch_OGS: Tensor
) -> Tensor:
    """The root of the squared error of each group, [O, G]."""
    values_OGS = _round(x_OGS, scale_OG, zero_OG, scheme, scratch_OGS)
    back_OGS = values_OGS.sub_(zero_OG[..., None]).mul_(scale_OG[..., None])
    error_OG: Tensor = torch.linalg.vector_norm(back_OGS.sub_(x_OGS), dim=-1)
    return error_OG


def _inverse(scale_OG: Tensor) -> Tensor:
    """1 / scale; 0 where the scale is."""
    return torch.where(scale_OG > 0, scale_OG.reciprocal(), 0.0)


def _as_float16(scale: Tensor) -> Tensor:
    """A number that float16 holds and that is not less, so the largest element is in reach."""
    above = scale * (1 + 2**-11) + 2**-25  # Half a step of float16, also where it has no exponent.
    return above.clamp(max=torch.finfo(torch.float16).max).half().float()
