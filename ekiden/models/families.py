"""What each ``model_type`` means where its config.json is silent, and the parts it is made of.

No torch. Defaults of missing fields are those of transformers, which wrote the file without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ekiden.core.errors import SetupError
from ekiden.models.fields import Fields

Parts = dict[str, Any]
"""Fields of ``ModelConfig`` in which a family differs from plain Llama."""

SLIDING, FULL = "sliding_attention", "full_attention"

_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072},
    "phi3": {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "bos_token_id": 1,
    },
    "olmo2": {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
}


def family_parts(fields: Fields) -> Parts:
    """The parts of ``fields``' model type.

    Raises:
        SetupError: a field asks for what this family does not do here.
    """
    return _FAMILIES[fields.get("model_type")](fields)


def _llama(fields: Fields) -> Parts:
    bias = bool(fields.get("attention_bias", False))
    mlp_bias = bool(fields.get("mlp_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp_bias}


def _mistral(fields: Fields) -> Parts:
    return {"windows": _every_layer(fields)}


def _qwen2(fields: Fields) -> Parts:
    return {"qkv_bias": True, "windows": _qwen_windows(fields)}


def _qwen3(fields: Fields) -> Parts:
    bias = bool(fields.get("attention_bias", False))
    windows = _qwen_windows(fields)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "windows": windows}


def _gemma(fields: Fields) -> Parts:
    """What Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786) share."""
    if fields.get("use_bidirectional_attention"):
        raise SetupError(f"{fields.file}: use_bidirectional_attention is not supported: remove it")
    bias = bool(fields.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "activation": "gelu_tanh",
        "norm_offset": 1.0,
        "embedding_scale": float(fields.positive("hidden_size")) ** 0.5,
        "attention_scale": float(fields.number("query_pre_attn_scalar")) ** -0.5,
        "attention_soft_cap": float(fields.get("attn_logit_softcapping") or 0.0),
        "final_soft_cap": float(fields.get("final_logit_softcapping") or 0.0),
    }


def _gemma2(fields: Fields) -> Parts:
    return {**_gemma(fields), "windows": _typed_windows(fields, lambda i: i % 2 == 0)}


def _gemma3(fields: Fields) -> Parts:
    every = fields.positive("sliding_window_pattern", 6)
    windows = _typed_windows(fields, lambda i: (i + 1) % every != 0)
    return {**_gemma(fields), "qk_norm": "head", "windows": windows}


def _phi3(fields: Fields) -> Parts:
    """Phi-3 and Phi-4, whose files say phi3 (arXiv:2404.14219)."""
    return {"windows": _every_layer(fields)}


def _olmo2(fields: Fields) -> Parts:
    """OLMo 2 (arXiv:2501.00656)."""
    bias = bool(fields.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "whole"}


_FAMILIES: dict[str, Callable[[Fields], Parts]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
}


def _every_layer(fields: Fields) -> tuple[int, ...]:
    return (fields.get("sliding_window") or 0,) * fields.positive("num_hidden_layers")


def _qwen_windows(fields: Fields) -> tuple[int, ...]:
    """Qwen slides from layer max_window_layers up, if told to slide at all."""
    if not fields.get("use_sliding_window", False):
        return (0,) * fields.positive("num_hidden_layers")
    first = fields.get("max_window_layers")
    return _typed_windows(fields, lambda i: i >= first)


def _typed_windows(fields: Fields, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """By ``layer_types``, or where ``slides`` says so of a layer."""
    layers, window = fields.positive("num_hidden_layers"), fields.get("sliding_window") or 0
    kinds = fields.get("layer_types") or [SLIDING if slides(i) else FULL for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {SLIDING, FULL}:
        raise SetupError(
            f"{fields.file}: layer_types must name {layers} layers, each {FULL} or {SLIDING}"
        )
    return tuple(window if kind == SLIDING else 0 for kind in kinds)
