"""What a checkpoint's ``config.json`` says, read once and checked. No torch.

One struct serves every family: what differs between families is a field (bias, qk-norm,
windows), so that the model code has no branch on a model's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ekiden.cache.layout import DTYPE_BYTES
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.models.registry import MODELS
from ekiden.models.rope_config import RopeConfig, parse_rope
from ekiden.models.vocabulary import known_tokens


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer of the Llama family, as its checkpoint describes it."""

    model_type: str
    vocab_size: int
    """Columns of the logits."""
    valid_vocab_size: int
    """Tokens the tokenizer knows; columns from here to ``vocab_size`` are padding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    """Longest sequence in tokens, RoPE scaling taken into account."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    """For each layer, how many last positions a token sees (itself included); 0 means all."""
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """Read ``config.json``, ``generation_config.json`` and the tokenizer's size.

        Raises:
            SetupError: no such file, a broken one, or a model that is not supported; the
                message names the file, the field, its value and the valid choices.
        """
        file = path / "config.json"
        fields = _Fields(_read_json(file), file)
        _refuse_unsupported(fields)
        return cls(**_geometry(fields), **_flags(fields), **_tokens(fields, path))

    def resolve_dtype(self, config: EngineConfig) -> str:
        """The dtype of weights, activations and KV: ``--dtype``, or the checkpoint's."""
        return self.dtype if config.dtype == "auto" else config.dtype

    def resolve_max_model_len(self, config: EngineConfig) -> int:
        """``--max-model-len``, or the model's own limit.

        Raises:
            SetupError: more was asked for than the model's positions reach.
        """
        if config.max_model_len > self.max_position_embeddings:
            raise SetupError(
                f"--max-model-len {config.max_model_len} is more than the model's "
                f"{self.max_position_embeddings} positions: choose 1 to "
                f"{self.max_position_embeddings}, or set RoPE scaling in its config.json"
            )
        return config.max_model_len or self.max_position_embeddings


class _Fields:
    """A JSON object that knows its file, for errors that name both."""

    def __init__(self, values: dict[str, Any], file: Path) -> None:
        self.values = values
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number above zero; a missing or null field takes ``default``."""
        value = self.values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SetupError(f"{self.file}: {name} is {value!r}: it must be a whole number above 0")
        return value


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise SetupError(f"{file} does not exist: is this a model directory?") from None
    except (OSError, msgspec.DecodeError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from None


def _refuse_unsupported(fields: _Fields) -> None:
    model_type, supported = fields.get("model_type"), ", ".join(sorted(MODELS))
    if model_type not in MODELS:
        raise SetupError(
            f"{fields.file}: model_type {model_type!r} is not supported: choose one of {supported}"
        )
    if (act := fields.get("hidden_act", "silu")) != "silu":
        raise SetupError(f"{fields.file}: hidden_act {act!r} is not supported: only silu is")
    if fields.get("quantization_config"):
        raise SetupError(
            f"{fields.file}: quantization_config is set, and quantised checkpoints are not "
            "supported: use the float32, bfloat16 or float16 checkpoint of this model"
        )


def _geometry(fields: _Fields) -> dict[str, Any]:
    family = fields.get("model_type")
    heads = fields.positive("num_attention_heads")
    hidden = fields.positive("hidden_size")
    # Defaults for missing fields are those of transformers, which wrote the file.
    kv_default = {"mistral": 8}.get(family, heads)
    head_dim = hidden // heads
    if "head_dim" not in fields.values and family == "qwen3":
        head_dim = 128
    elif fields.get("head_dim"):
        head_dim = fields.positive("head_dim")
    positions = fields.positive("max_position_embeddings")
    rope = parse_rope(fields.values, positions, fields.file)
    layers = fields.positive("num_hidden_layers")
    return {
        "model_type": family,
        "vocab_size": fields.positive("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.positive("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": fields.positive("num_key_value_heads", kv_default),
        "head_dim": head_dim,
        "rms_norm_eps": float(fields.get("rms_norm_eps", 1e-6)),
        "rope": rope,
        "max_position_embeddings": rope.reach(positions),
        "windows": _windows(fields, family, layers),
    }


def _windows(fields: _Fields, family: str, layers: int) -> tuple[int, ...]:
    """One window per layer. Mistral slides in every layer; Qwen from max_window_layers up."""
    if family == "llama":
        return (0,) * layers
    window = fields.get("sliding_window", 4096)
    if family == "mistral":
        return (window or 0,) * layers
    if not fields.get("use_sliding_window", False) or not window:
        return (0,) * layers
    first = fields.get("max_window_layers", 28)
    kinds = fields.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise SetupError(
            f"{fields.file}: layer_types must name {layers} layers, each full_attention or "
            f"sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _flags(fields: _Fields) -> dict[str, Any]:
    family = fields.get("model_type")
    bias = family in ("llama", "qwen3") and bool(fields.get("attention_bias", False))
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise SetupError(
            f"{fields.file}: dtype {dtype!r} is not supported: choose {', '.join(DTYPE_BYTES)}"
        )
    return {
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "qkv_bias": bias or family == "qwen2",
        "o_bias": bias,
        "mlp_bias": family == "llama" and bool(fields.get("mlp_bias", False)),
        "qk_norm": family == "qwen3",
        "dtype": dtype,
    }


def _tokens(fields: _Fields, path: Path) -> dict[str, Any]:
    """Special tokens as generation uses them: generation_config.json wins over config.json."""
    file = path / "generation_config.json"
    generation = _read_json(file) if file.exists() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = fields.get("eos_token_id")
    if eos is None:
        eos = []
    vocab = fields.positive("vocab_size")
    return {
        "bos_token_id": generation.get("bos_token_id", fields.get("bos_token_id")),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else (eos,),
        "valid_vocab_size": min(vocab, known_tokens(path) or vocab),
    }
