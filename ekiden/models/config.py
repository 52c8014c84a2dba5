"""What a checkpoint's ``config.json`` says, read once and checked. No torch.

One struct serves every family: what differs between families is a field (``families.py``), so that
the model code has no branch on a model's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ekiden.cache.layout import DTYPE_BYTES
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.models.families import DEFAULTS, family_parts
from ekiden.models.fields import Fields, read_json
from ekiden.models.quantization_config import QuantizationConfig, parse_quantization
from ekiden.models.registry import MODELS
from ekiden.models.rope_config import RopeConfig, parse_ropes
from ekiden.models.vocabulary import known_tokens


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder-only transformer, as its checkpoint describes it."""

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
    windows: tuple[int, ...]
    """For each layer, how many last positions a token sees (itself included); 0 means all."""
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None = None
    """How the checkpoint's matrices are stored; None: as floats."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    """Norm of q and k before they are rotated: ``head`` by head, over the ``whole`` width, none."""
    activation: str = "silu"
    """Of the gated MLP; or ``gelu_tanh``."""
    norm_offset: float = 0.0
    """What the stored weights of norms lack."""
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """Of scores; 0 for head_dim ** -0.5."""
    attention_soft_cap: float = 0.0
    """0 for none, as ``final_soft_cap``, which is of the logits."""
    final_soft_cap: float = 0.0
    local_rope: RopeConfig | None = None
    """Of the layers with a window, where it is not that of the others."""

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """Read ``config.json``, ``generation_config.json`` and the tokenizer's size.

        Raises:
            SetupError: no such file, a broken one, or a model that is not supported; the
                message names the file, the field, its value and the valid choices.
        """
        file = path / "config.json"
        values = read_json(file)
        fields = Fields(values, file, DEFAULTS.get(str(values.get("model_type"))))
        try:
            _refuse_unsupported(fields)
            common = {**_geometry(fields), **_precision(fields), **_tokens(fields, path)}
            return cls(**{**common, **family_parts(fields)})
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise SetupError(f"{file} has a field of the wrong kind: {error}") from error

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


def _refuse_unsupported(fields: Fields) -> None:
    model_type, supported = fields.get("model_type"), ", ".join(sorted(MODELS))
    if model_type not in MODELS:
        raise SetupError(
            f"{fields.file}: model_type {model_type!r} is not supported: choose one of {supported}"
        )
    name = "hidden_activation" if model_type.startswith("gemma") else "hidden_act"
    valid = "gelu_pytorch_tanh" if model_type.startswith("gemma") else "silu"
    if (act := fields.get(name) or valid) != valid:
        raise SetupError(f"{fields.file}: {name} {act!r} is not supported: only {valid} is")


def _geometry(fields: Fields) -> dict[str, Any]:
    family = fields.get("model_type")
    heads = fields.positive("num_attention_heads")
    hidden = fields.positive("hidden_size")
    head_dim = hidden // heads
    if fields.get("head_dim"):
        head_dim = fields.positive("head_dim")
    positions = fields.positive("max_position_embeddings")
    rope, local_rope = parse_ropes(fields.values, positions, fields.file)
    layers = fields.positive("num_hidden_layers")
    return {
        "model_type": family,
        "vocab_size": fields.positive("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.positive("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": fields.positive("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(fields.get("rms_norm_eps", 1e-6)),
        "rope": rope,
        "local_rope": local_rope,
        "max_position_embeddings": rope.reach(positions),
        "windows": (0,) * layers,
    }


def _precision(fields: Fields) -> dict[str, Any]:
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise SetupError(
            f"{fields.file}: dtype {dtype!r} is not supported: choose {', '.join(DTYPE_BYTES)}"
        )
    return {
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "dtype": dtype,
        "quantization": parse_quantization(fields.get("quantization_config"), fields.file),
    }


def _tokens(fields: Fields, path: Path) -> dict[str, Any]:
    """Special tokens as generation uses them: generation_config.json wins over config.json."""
    file = path / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    source, eos = file, generation.get("eos_token_id")
    if eos is None:
        source, eos = fields.file, fields.get("eos_token_id")
    if eos is None:
        eos = []
    ends = eos if isinstance(eos, list) else [eos]
    if any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
        raise SetupError(f"{source}: eos_token_id is {eos!r}: it must be token ids")
    vocab = fields.positive("vocab_size")
    return {
        "bos_token_id": generation.get("bos_token_id", fields.get("bos_token_id")),
        "eos_token_ids": tuple(ends),
        "valid_vocab_size": min(vocab, known_tokens(path) or vocab),
    }
