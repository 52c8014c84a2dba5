"""From a model's RoPE settings to its frequencies."""

from __future__ import annotations

import torch

from ekiden.core.errors import SetupError
from ekiden.layers.rope import (
    Rope,
    llama3_frequencies,
    longrope_scale,
    plain_frequencies,
    yarn_frequencies,
    yarn_scale,
)
from ekiden.models.rope_config import RopeConfig


def build_rope(config: RopeConfig, head_dim: int, max_model_len: int, device: torch.device) -> Rope:
    """A rotary embedding, its frequencies float32 on ``device``.

    Raises:
        SetupError: factors that do not fit the head.
    """
    plain_F = plain_frequencies(config.theta, int(head_dim * config.rotated))
    if config.kind == "longrope":
        return _longrope(config, plain_F, max_model_len, device)
    if config.kind == "linear":
        return Rope((plain_F / config.factor).to(device))
    if config.kind == "llama3":
        scaled_F = llama3_frequencies(
            plain_F,
            factor=config.factor,
            low=config.low_freq_factor,
            high=config.high_freq_factor,
            original=config.original_max_position,
        )
        return Rope(scaled_F.to(device))
    if config.kind == "yarn":
        scaled_F = yarn_frequencies(
            plain_F,
            config.theta,
            factor=config.factor,
            original=config.original_max_position,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            truncate=config.truncate,
        )
        scale = config.attention_factor
        return Rope(scaled_F.to(device), yarn_scale(config.factor) if scale is None else scale)
    return Rope(plain_F.to(device))


def _longrope(
    config: RopeConfig, plain_F: torch.Tensor, max_model_len: int, device: torch.device
) -> Rope:
    long = config.is_long(max_model_len)
    factors = config.long_factors if long else config.short_factors
    if len(factors) != len(plain_F):
        raise SetupError(
            f"longrope RoPE scaling has {len(factors)} factors, and the model rotates "
            f"{len(plain_F)} pairs of a head"
        )
    scale = config.attention_factor
    if scale is None:
        scale = longrope_scale(config.factor, config.original_max_position)
    return Rope((plain_F / torch.tensor(factors)).to(device), scale)
