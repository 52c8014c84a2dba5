"""A GGUF file's metadata as a Llama ``config.json``: geometry, RoPE scaling, special ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ekiden.core.errors import SetupError
from ekiden.models.gguf_reader import Metadata

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds Llama 3.1's frequency factors; no weight of the model."""


def read_geometry(meta: Metadata) -> dict[str, Any]:
    """``config.json`` of a Llama model, all but ties, RoPE scaling and special ids."""
    if (family := meta.need("general.architecture")) != "llama":
        raise SetupError(f"GGUF architecture {family!r} is not supported: only 'llama' is")
    if experts := meta.get("llama.expert_count", 0):
        raise SetupError(f"llama.expert_count is {experts}: mixtures of experts are not supported")
    heads = int(meta.need("llama.attention.head_count"))
    hidden = int(meta.need("llama.embedding_length"))
    head_dim = int(meta.get("llama.attention.key_length", hidden // heads))
    rotary = int(meta.get("llama.rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise SetupError(f"llama.rope.dimension_count {rotary} differs from head dim {head_dim}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(meta.need("llama.feed_forward_length")),
        "max_position_embeddings": int(meta.need("llama.context_length")),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(meta.need("llama.block_count")),
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "rms_norm_eps": _decimal(meta.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(meta.get("llama.rope.freq_base", 10000.0)),
        "torch_dtype": "bfloat16",
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
    }


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32, so that 1e-5 is written as 1e-5."""
    return float(str(np.float32(value)))


def special_ids(meta: Metadata) -> dict[str, Any]:
    """Ids of begin, end and padding. The end may be a list: end of text, turn and message."""
    ends = [meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(int(end) for end in ends if end is not None))
    ids = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def rope_scaling(meta: Metadata, tensors: list[Any], config: dict[str, Any]) -> dict[str, Any]:
    """``rope_scaling``, from the scaling fields or from the frequency factors of Llama 3.1."""
    kind = meta.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        factor = _decimal(meta.need("llama.rope.scaling.factor"))
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "none":
        raise SetupError(f"llama.rope.scaling.type {kind!r} is not supported: none or linear")
    for tensor in tensors:
        if tensor.name == ROPE_FACTORS:
            return {"rope_scaling": _llama3_scaling(np.asarray(tensor.data), config)}
    return {}


def _llama3_scaling(factors_D: npt.NDArray[np.float32], config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's parameters whose frequency factors are these, or SetupError.

    factors_D: float32 [head_dim / 2], by which each inverse frequency is divided.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors_D.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected_D = _llama3_factors(scaling, config["rope_theta"], config["head_dim"])
    if factors_D.shape != expected_D.shape or not np.allclose(factors_D, expected_D, rtol=1e-3):
        raise SetupError(f"the RoPE factors in {ROPE_FACTORS} are not those of Llama 3's scaling")
    return scaling


def _llama3_factors(scaling: dict[str, Any], theta: float, dim: int) -> npt.NDArray[np.float64]:
    """Float64 [dim / 2]: what Llama 3.1 divides its inverse frequencies by."""
    wavelength_D = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_D = scaling["original_max_position_embeddings"] / wavelength_D
    smooth_D = np.clip((turns_D - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth_D) / scaling["factor"] + smooth_D)  # type: ignore[no-any-return]
