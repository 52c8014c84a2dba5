"""What each ``model_type`` of a ``config.json`` is made of: a table, read by ``reading.py``.

Defaults are those that transformers fills in where a file is silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.sizes import Sizes

Slides = Callable[[Sizes, int], bool]
"""Whether a layer sees a window only, where the file has no ``layer_types``."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One row: in which ways a family is not plain Llama."""

    defaults: dict[str, Any] = {}
    qkv_bias: bool | None = None
    """None: as ``attention_bias`` says, and then of the output projection too."""
    o_bias: bool | None = None
    qk_norm: str = ""
    norms: int = 2
    final_norms: int = 1
    gated: bool = True
    mlp_bias: bool = False
    """Whatever ``mlp_bias`` says."""
    sinks: bool = False
    output_gate: bool = False
    latent: bool = False
    slides: Slides | None = None
    """None: every layer sees everything."""
    window_field: str = "sliding_window"
    inner_field: str = "intermediate_size"
    dense_inner_field: str = "intermediate_size"
    """Of the dense layers of a MoE model."""
    experts_field: str = ""
    """Empty: a dense model."""
    moe_inner_field: str = "moe_intermediate_size"
    is_sparse: Slides = lambda fields, layer: True
    """Whether a layer of a MoE model has experts."""
    expert_bias: bool = False
    correction_bias: bool = False
    shared_field: str = ""
    """Inner width of the shared expert; ``n_shared_experts`` counts experts of the routed width."""
    shared_gate: bool = False
    position_offset: int = 0
    """Rows of a table of learned positions beyond ``max_position_embeddings``; 0: no table."""


def _always(fields: Sizes, layer: int) -> bool:
    return True


def _qwen_slides(fields: Sizes, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer >= fields.optional("max_window_layers")


def _all_but_every(name: str, default: int) -> Slides:
    """Every so many layers, counted from one, a layer sees everything."""

    def slides(fields: Sizes, layer: int) -> bool:
        return (layer + 1) % fields.positive(name, default) != 0

    return slides


def _even(fields: Sizes, layer: int) -> bool:
    return layer % 2 == 0


def _llama4_local(fields: Sizes, layer: int) -> bool:
    """Layers with rotation attend within chunks; those without (every fourth) to everything."""
    given = fields.get("no_rope_layers")
    return bool(given[layer]) if given else (layer + 1) % 4 != 0


def _llama4_sparse(fields: Sizes, layer: int) -> bool:
    return (layer + 1) % fields.positive("interleave_moe_layer_step", 1) == 0


def _after_dense(fields: Sizes, layer: int) -> bool:
    every = fields.positive("moe_layer_freq", 1)
    return layer >= fields.optional("first_k_dense_replace") and layer % every == 0


def _qwen_sparse(fields: Sizes, layer: int) -> bool:
    dense = fields.get("mlp_only_layers") or ()
    return layer not in dense and (layer + 1) % fields.positive("decoder_sparse_step", 1) == 0


_GEMMA: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True}
_QWEN3_NEXT = Family(
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    qk_norm="head",
    output_gate=True,
)
_SPARSE_QWEN: dict[str, Any] = {
    "experts_field": "num_experts",
    "is_sparse": _qwen_sparse,
    "shared_field": "shared_expert_intermediate_size",
}
_DEEPSEEK = Family(
    latent=True,
    experts_field="n_routed_experts",
    is_sparse=_after_dense,
    correction_bias=True,
    shared_field="n_shared_experts",
)
_LLAMA4 = Family(
    defaults={"head_dim": 128, "attention_chunk_size": 8192, "intermediate_size_mlp": 16384},
    slides=_llama4_local,
    window_field="attention_chunk_size",
    experts_field="num_local_experts",
    is_sparse=_llama4_sparse,
    dense_inner_field="intermediate_size_mlp",
    moe_inner_field="intermediate_size",
    shared_field="intermediate_size",
)
_GEMMA3 = Family(
    defaults=_GEMMA,
    qk_norm="head",
    norms=4,
    slides=_all_but_every("sliding_window_pattern", 6),
)
_REPLACE = msgspec.structs.replace
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(slides=_always),
    "mixtral": Family(
        slides=_always, experts_field="num_local_experts", moe_inner_field="intermediate_size"
    ),
    "qwen2": Family(qkv_bias=True, o_bias=False, slides=_qwen_slides),
    "qwen2_moe": Family(
        qkv_bias=True, o_bias=False, slides=_qwen_slides, shared_gate=True, **_SPARSE_QWEN
    ),
    "qwen3": Family(defaults={"head_dim": 128}, qk_norm="head", slides=_qwen_slides),
    "qwen3_moe": Family(
        qk_norm="head", slides=_qwen_slides, experts_field="num_experts", is_sparse=_qwen_sparse
    ),
    "qwen3_next": _REPLACE(_QWEN3_NEXT, shared_gate=True, **_SPARSE_QWEN),
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_5_moe_text": _REPLACE(_QWEN3_NEXT, shared_gate=True, **_SPARSE_QWEN),
    "gemma2": Family(defaults=_GEMMA, norms=4, slides=_even),
    "gemma3_text": _GEMMA3,
    "phi3": Family(slides=_always),
    "olmo2": Family(qk_norm="whole"),
    "exaone4": Family(
        qk_norm="head",
        qkv_bias=False,
        o_bias=False,
        slides=_all_but_every("sliding_window_pattern", 4),
    ),
    "gpt_oss": Family(
        defaults={"head_dim": 64},
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        slides=_even,
        experts_field="num_local_experts",
        moe_inner_field="intermediate_size",
        expert_bias=True,
    ),
    "llama4_text": _LLAMA4,
    "deepseek_v2": _REPLACE(_DEEPSEEK, correction_bias=False),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "opt": Family(
        defaults={"tie_word_embeddings": True},
        qkv_bias=True,
        o_bias=True,
        gated=False,
        mlp_bias=True,
        norms=4,
        final_norms=2,
        inner_field="ffn_dim",
        position_offset=2,
    ),
}
_OUTER_TYPES = {"gemma3": "gemma3_text", "llama4": "llama4_text", "qwen3_5": "qwen3_5_text"}
"""Families of several towers whose ``text_config`` may leave its own ``model_type`` out."""


def resolve_family(fields: Sizes) -> Family:
    """The row of ``fields``' model type.

    Raises:
        SetupError: there is none; the message has those that there are.
    """
    given = fields.get("model_type")
    if (kind := _OUTER_TYPES.get(str(given), given)) not in FAMILIES:
        raise SetupError(
            f"{fields.file}: model_type {given!r} is not one whose geometry is known: choose one "
            f"of {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]
