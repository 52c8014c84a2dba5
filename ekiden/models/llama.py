"""The Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. What differs is in ``ModelConfig``."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ekiden.layers.attention import Attention, AttentionSpec
from ekiden.layers.mlp import GatedMlp
from ekiden.layers.norm import RMSNorm
from ekiden.layers.ops import AttentionKind
from ekiden.layers.site import Site
from ekiden.layers.vocab import LmHead, VocabEmbedding
from ekiden.models.config import ModelConfig
from ekiden.models.decoder import Decoder, DecoderLayer
from ekiden.models.layout import layer_split
from ekiden.models.rope import build_rope
from ekiden.parallel.mesh import Mesh

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_RECOMPUTED = ".rotary_emb.inv_freq"
"""Old checkpoints store the rotary frequencies; they follow from config.json."""


def load_stage(
    model: ModelConfig, mesh: Mesh, site: Site, dtype: torch.dtype, max_blocks: int
) -> Decoder:
    """Take this rank's slices from the site's source.

    Raises:
        SetupError: a weight is missing or has another shape, or the split cannot work.
    """
    first, last = layer_split(model, mesh.pp.size)[mesh.pp_rank]
    embedding = _load_embedding(model, mesh, site)
    return Decoder(
        mesh=mesh,
        ops=site.ops,
        dtype=dtype,
        hidden_size=model.hidden_size,
        max_blocks=max_blocks,
        ropes=[build_rope(model.rope, model.head_dim, site.device)],
        layers=[_load_layer(model, site, i, i - first) for i in range(first, last)],
        embedding=embedding,
        norm=_load_norm(model, site, FINAL_NORM) if mesh.is_last_stage else None,
        head=_load_head(model, mesh, site, embedding),
    )


def wanted_tensors(model: ModelConfig, mesh: Mesh) -> Callable[[str], bool]:
    """Which tensors of a checkpoint the rank's stage must use, every last one.

    Names that no stage knows are wanted by all, so that a checkpoint with weights that this
    model has no place for is refused. A tied model's own head is a copy, and is left alone.
    """
    first, last = layer_split(model, mesh.pp.size)[mesh.pp_rank]

    def wanted(name: str) -> bool:
        if match := _LAYER.match(name):
            inside = first <= int(match[1]) < last or int(match[1]) >= model.num_layers
            return inside and not name.endswith(_RECOMPUTED)
        if name == EMBEDDING:
            return mesh.is_first_stage or (mesh.is_last_stage and model.tie_word_embeddings)
        if name == HEAD:
            return mesh.is_last_stage and not model.tie_word_embeddings
        return mesh.is_last_stage if name == FINAL_NORM else True

    return wanted


def _load_layer(model: ModelConfig, site: Site, index: int, local: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    spec = AttentionSpec(
        hidden=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        qkv_bias=model.qkv_bias,
        o_bias=model.o_bias,
        qk_norm_eps=model.rms_norm_eps if model.qk_norm else None,
        kind=AttentionKind(scale=model.head_dim**-0.5, window=model.windows[index]),
    )
    return DecoderLayer(
        attention_norm=_load_norm(model, site, f"{prefix}.input_layernorm.weight"),
        attention=Attention.load(site, f"{prefix}.self_attn", spec, layer=local),
        mlp_norm=_load_norm(model, site, f"{prefix}.post_attention_layernorm.weight"),
        mlp=GatedMlp.load(
            site,
            f"{prefix}.mlp",
            model.hidden_size,
            model.intermediate_size,
            bias=model.mlp_bias,
        ),
    )


def _load_norm(model: ModelConfig, site: Site, name: str) -> RMSNorm:
    return RMSNorm.load(site, name, model.hidden_size, model.rms_norm_eps)


def _load_embedding(model: ModelConfig, mesh: Mesh, site: Site) -> VocabEmbedding | None:
    if not mesh.is_first_stage:
        return None
    return VocabEmbedding.load(site, EMBEDDING, model.vocab_size, model.hidden_size)


def _load_head(
    model: ModelConfig, mesh: Mesh, site: Site, embedding: VocabEmbedding | None
) -> LmHead | None:
    """A tied model's head is its embedding: shared where both are here, else loaded for it."""
    if not mesh.is_last_stage:
        return None
    vocab, valid = model.vocab_size, model.valid_vocab_size
    if model.tie_word_embeddings and embedding is not None:
        return LmHead.tied(site, embedding, vocab, valid=valid)
    name = EMBEDDING if model.tie_word_embeddings else HEAD
    return LmHead.load(site, name, vocab, model.hidden_size, valid=valid)
