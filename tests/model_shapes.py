"""Descriptions of models that do not exist, for what needs a shape and no weights."""

from __future__ import annotations

from typing import Any

from ekiden.models.config import ModelConfig
from ekiden.models.rope_config import RopeConfig


def llama_shape(*, num_layers: int, vocab_size: int, **fields: Any) -> ModelConfig:
    """A Llama of float32 with tied embeddings; ``fields`` are ModelConfig's."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "valid_vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=1e4),
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": "",
        "windows": (0,) * num_layers,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_ids": (1,),
    }
    return ModelConfig(num_layers=num_layers, vocab_size=vocab_size, **(values | fields))
