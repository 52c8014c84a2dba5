"""A model's description without a model."""

from __future__ import annotations

import pytest
from model_shapes import llama_shape

from ekiden.models.config import ModelConfig


@pytest.fixture
def small_model() -> ModelConfig:
    """3 layers, 2 heads and 2 KV heads of 4 float32 elements, 32 positions."""
    return llama_shape(
        num_layers=3,
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        max_position_embeddings=32,
    )
