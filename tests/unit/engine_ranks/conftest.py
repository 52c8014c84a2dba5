"""A model's description without a model."""

from __future__ import annotations

import pytest

from ekiden.models.config import ModelConfig
from ekiden.models.rope_config import RopeConfig


@pytest.fixture
def small_model() -> ModelConfig:
    """3 layers, 2 heads and 2 KV heads of 4 float32 elements, 32 positions."""
    return ModelConfig(
        model_type="llama",
        vocab_size=8,
        valid_vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4),
        max_position_embeddings=32,
        tie_word_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm="",
        windows=(0,) * 3,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(1,),
    )
