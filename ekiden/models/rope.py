"""From a model's RoPE settings to its frequencies."""

from __future__ import annotations

import torch

from ekiden.layers.rope import (
    Rope,
    llama3_frequencies,
    plain_frequencies,
    yarn_frequencies,
    yarn_scale,
)
from ekiden.models.rope_config import RopeConfig


def build_rope(config: RopeConfig, head_dim: int, device: torch.device) -> Rope:
    """The rotary embedding of every layer, its frequencies float32 on ``device``."""
    plain_F = plain_frequencies(config.theta, head_dim)
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
