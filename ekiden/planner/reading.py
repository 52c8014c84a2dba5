"""Every layer of a model, read out of its config by the row of its family."""

from __future__ import annotations

from ekiden.core.errors import SetupError
from ekiden.planner.families import Family
from ekiden.planner.parts import (
    AnyAttention,
    Attention,
    LatentAttention,
    Layer,
    LinearAttention,
    Mlp,
    Moe,
)
from ekiden.planner.sizes import Sizes

_TOP_K = "num_experts_per_tok"


def layers_of(family: Family, fields: Sizes) -> tuple[Layer, ...]:
    """Every decoder layer, in order."""
    kinds = _kinds(family, fields)
    return tuple(
        Layer(
            attention=_attention(family, fields, kind),
            mlp=_mlp(family, fields, layer),
            norms=family.norms,
        )
        for layer, kind in enumerate(kinds)
    )


FULL, LINEAR = "full_attention", "linear_attention"
_WINDOWED = ("sliding_attention", "chunked_attention")


def _kinds(family: Family, fields: Sizes) -> list[str]:
    """``layer_types`` of the file, or what the family's rule says."""
    count = fields.positive("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is None and family.defaults.get("linear_conv_kernel_dim"):
        every = fields.positive("full_attention_interval", 4)
        return [LINEAR if (i + 1) % every else FULL for i in range(count)]
    if kinds is None:
        slides = family.slides
        return [_WINDOWED[0] if slides and slides(fields, i) else FULL for i in range(count)]
    known = (FULL, LINEAR, *_WINDOWED)
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - set(known):
        raise SetupError(
            f"{fields.file}: layer_types must name {count} layers, each one of {', '.join(known)}"
        )
    return kinds


def _attention(family: Family, fields: Sizes, kind: str) -> AnyAttention:
    heads = fields.positive("num_attention_heads")
    if kind == LINEAR:
        return LinearAttention(
            key_heads=fields.positive("linear_num_key_heads"),
            value_heads=fields.positive("linear_num_value_heads"),
            key_dim=fields.positive("linear_key_head_dim"),
            value_dim=fields.positive("linear_value_head_dim"),
            kernel=fields.positive("linear_conv_kernel_dim"),
        )
    if family.latent:
        return LatentAttention(
            heads=heads,
            q_rank=fields.optional("q_lora_rank"),
            kv_rank=fields.positive("kv_lora_rank"),
            nope_dim=fields.positive("qk_nope_head_dim"),
            rope_dim=fields.positive("qk_rope_head_dim"),
            v_dim=fields.positive("v_head_dim"),
        )
    return _grouped(family, fields, kind, heads)


def _grouped(family: Family, fields: Sizes, kind: str, heads: int) -> Attention:
    kv_heads = fields.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise SetupError(
            f"{fields.file}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    stated = fields.flag("attention_bias")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.optional("head_dim") or fields.positive("hidden_size") // heads,
        window=fields.optional(family.window_field) if kind in _WINDOWED else 0,
        qkv_bias=stated if family.qkv_bias is None else family.qkv_bias,
        o_bias=stated if family.o_bias is None else family.o_bias,
        qk_norm=family.qk_norm,
        output_gate=family.output_gate,
        sinks=family.sinks,
        rotated=0.0 if family.position_offset else fields.part("partial_rotary_factor"),
    )


def _mlp(family: Family, fields: Sizes, layer: int) -> Mlp | Moe:
    if family.experts_field and family.is_sparse(fields, layer):
        inner = fields.positive(family.moe_inner_field)
        experts, top_k = fields.positive(family.experts_field), fields.positive(_TOP_K)
        if top_k > experts:
            raise SetupError(
                f"{fields.file}: {_TOP_K} {top_k} is more than the {experts} of "
                f"{family.experts_field}: choose 1 to {experts}"
            )
        groups, top_groups = _groups(fields, experts)
        return Moe(
            experts=experts,
            top_k=top_k,
            inner=inner,
            shared_inner=_shared_inner(family, fields, inner),
            shared_gate=family.shared_gate,
            bias=family.expert_bias,
            correction_bias=family.correction_bias,
            groups=groups,
            top_groups=top_groups,
        )
    name = family.dense_inner_field if family.experts_field else family.inner_field
    return Mlp(
        inner=fields.positive(name),
        gated=family.gated,
        bias=family.mlp_bias or fields.flag("mlp_bias"),
    )


def _groups(fields: Sizes, experts: int) -> tuple[int, int]:
    """Of experts, and how many of them a token may reach; (1, 1): any expert anywhere."""
    groups = fields.positive("n_group", 1)
    if experts % groups:
        raise SetupError(
            f"{fields.file}: {experts} experts do not divide into the {groups} groups of n_group"
        )
    reached = fields.positive("topk_group", groups)
    if reached > groups:
        raise SetupError(
            f"{fields.file}: topk_group {reached} is more than the {groups} of n_group: choose 1 "
            f"to {groups}"
        )
    return groups, reached


def _shared_inner(family: Family, fields: Sizes, inner: int) -> int:
    if not family.shared_field:
        return 0
    value = fields.optional(family.shared_field)
    return value * inner if family.shared_field == "n_shared_experts" else value
