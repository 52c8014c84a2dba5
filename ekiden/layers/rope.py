"""Rotary position embedding (arXiv:2104.09864), halves rotated as in the Llama checkpoints.

Shapes: T tokens, N heads, D head dim, R rotated dims, F = R / 2 frequencies. Angles are float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """cos and sin of one step's tokens, each [T, R] float32, contiguous; R dims are rotated.

    Both halves of the last axis are equal.
    """

    cos_TR: Tensor
    sin_TR: Tensor


class Rope:
    """Angles of positions, from the inverse frequencies that the model's scaling gives."""

    def __init__(self, inverse_frequencies_F: Tensor, scale: float = 1.0) -> None:
        self.inverse_frequencies_F = inverse_frequencies_F
        self.scale = scale

    def rotation(self, positions_T: Tensor) -> Rotation:
        angles_TF = positions_T.to(torch.float32)[:, None] * self.inverse_frequencies_F
        angles_TR = torch.cat((angles_TF, angles_TF), dim=-1)
        return Rotation(angles_TR.cos() * self.scale, angles_TR.sin() * self.scale)


def rotate(x_TND: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first R dims of every head by its token's position; in float32, dtype kept."""
    rotated = rotation.cos_TR.shape[-1]
    x32_TNR = x_TND[..., :rotated].float()
    first, second = x32_TNR.chunk(2, dim=-1)
    turned_TNR = torch.cat((-second, first), dim=-1)
    cos_T1R, sin_T1R = rotation.cos_TR[:, None], rotation.sin_TR[:, None]
    out_TNR = (x32_TNR * cos_T1R + turned_TNR * sin_T1R).to(x_TND.dtype)
    if rotated == x_TND.shape[-1]:
        return out_TNR
    return torch.cat((out_TNR, x_TND[..., rotated:]), dim=-1)


def plain_frequencies(theta: float, head_dim: int) -> Tensor:
    """theta ** (-2 i / D) for i in [0, F), float32."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents_F


def llama3_frequencies(
    plain_F: Tensor, *, factor: float, low: float, high: float, original: int
) -> Tensor:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, the rest blended.

    A wave is long if it turns fewer than ``low`` times over the original context, and short if
    it turns more than ``high`` times.
    """
    turns_F = original * plain_F / (2 * math.pi)
    keep_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return plain_F * (keep_F + (1.0 - keep_F) / factor)


def yarn_frequencies(
    plain_F: Tensor,
    theta: float,
    *,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Tensor:
    """YaRN (arXiv:2309.00071): a linear ramp over dimensions between kept and slowed waves."""
    head_dim = 2 * plain_F.shape[0]

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # a step where both ends meet
    slowed_F = ((torch.arange(plain_F.shape[0]) - low) / width).clamp(0.0, 1.0)
    return plain_F * (1.0 - slowed_F) + plain_F / factor * slowed_F


def yarn_scale(factor: float) -> float:
    """What YaRN multiplies cos and sin by, so that attention stays as sharp as it was."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def longrope_scale(factor: float, original: int) -> float:
    """What LongRoPE (arXiv:2402.13753) multiplies cos and sin by."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
