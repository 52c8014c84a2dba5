"""The Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. What differs is in ``ModelConfig``."""

from __future__ import annotations

from ekiden.layers.attention import Attention, AttentionSpec
from ekiden.layers.mlp import GatedMlp
from ekiden.layers.site import Site
from ekiden.models.config import ModelConfig
from ekiden.models.decoder import DecoderLayer
from ekiden.models.stage import attention_kind, load_norm, rope_of


def load_layer(model: ModelConfig, site: Site, index: int, local: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    return DecoderLayer(
        attention_norm=load_norm(model, site, f"{prefix}.input_layernorm.weight"),
        attention=load_attention(model, site, index, local),
        mlp_norm=load_norm(model, site, f"{prefix}.post_attention_layernorm.weight"),
        mlp=load_mlp(model, site, index),
        rope=rope_of(model, index),
    )


def load_attention(model: ModelConfig, site: Site, index: int, local: int) -> Attention:
    spec = AttentionSpec(
        hidden=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        qkv_bias=model.qkv_bias,
        o_bias=model.o_bias,
        qk_norm=model.qk_norm,
        norm_eps=model.rms_norm_eps,
        norm_offset=model.norm_offset,
        kind=attention_kind(model, index),
    )
    return Attention.load(site, f"model.layers.{index}.self_attn", spec, layer=local)


def load_mlp(model: ModelConfig, site: Site, index: int) -> GatedMlp:
    return GatedMlp.load(
        site,
        f"model.layers.{index}.mlp",
        model.hidden_size,
        model.intermediate_size,
        bias=model.mlp_bias,
        activation=model.activation,
    )
