"""What the stages of every family have in common: the ends of the model, and who has which layer.

A family's file supplies its ``load_layer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ekiden.core.config import EngineConfig
from ekiden.layers.norm import RMSNorm
from ekiden.layers.ops import AttentionKind
from ekiden.layers.site import Site
from ekiden.layers.vocab import LmHead, VocabEmbedding
from ekiden.models.config import ModelConfig
from ekiden.models.decoder import Decoder, Layer
from ekiden.models.layout import layer_split
from ekiden.models.rope import build_rope
from ekiden.parallel.mesh import Mesh

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_RECOMPUTED = ".rotary_emb.inv_freq"
"""Old checkpoints store the rotary frequencies; they follow from config.json."""

LoadLayer = Callable[[ModelConfig, Site, int, int], Layer]
"""(model, site, layer of the model, layer of this rank's cache) to the layer."""


def build_stage(
    model: ModelConfig,
    config: EngineConfig,
    mesh: Mesh,
    site: Site,
    dtype: torch.dtype,
    load_layer: LoadLayer,
) -> Decoder:
    """Take this rank's slices from the site's source.

    Raises:
        SetupError: a weight is missing or has another shape, or the split cannot work.
    """
    first, last = _own_layers(model, config, mesh)
    longest = model.resolve_max_model_len(config)
    embedding = _load_embedding(model, mesh, site, dtype)
    ropes = [rope for rope in (model.rope, model.local_rope) if rope is not None]
    return Decoder(
        mesh=mesh,
        ops=site.ops,
        dtype=dtype,
        hidden_size=model.hidden_size,
        max_blocks=-(-longest // config.block_size),
        ropes=[build_rope(rope, model.head_dim, longest, site.device) for rope in ropes],
        layers=[load_layer(model, site, i, i - first) for i in range(first, last)],
        embedding=embedding,
        norm=load_norm(model, site, FINAL_NORM) if mesh.is_last_stage else None,
        head=_load_head(model, mesh, site, embedding),
    )


def wanted_tensors(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> Callable[[str], bool]:
    """Which tensors of a checkpoint the rank's stage must use, every last one.

    Names that no stage knows are wanted by all, so that a checkpoint with weights that this
    model has no place for is refused. A tied model's own head is a copy (``tied.py`` sees to it),
    and is left alone.
    """
    first, last = _own_layers(model, config, mesh)

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


def _own_layers(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> tuple[int, int]:
    split = layer_split(model, mesh.pp.size, prefill_only=config.prefill_only)
    return split[mesh.pp_rank]


def load_norm(model: ModelConfig, site: Site, name: str) -> RMSNorm:
    return RMSNorm.load(site, name, model.hidden_size, model.rms_norm_eps, offset=model.norm_offset)


def attention_kind(model: ModelConfig, layer: int) -> AttentionKind:
    return AttentionKind(
        scale=model.attention_scale or model.head_dim**-0.5,
        window=model.windows[layer],
        soft_cap=model.attention_soft_cap,
    )


def rope_of(model: ModelConfig, layer: int) -> int:
    """Which of the stage's rotations a layer takes."""
    return 1 if model.local_rope is not None and model.windows[layer] else 0


def _load_embedding(
    model: ModelConfig, mesh: Mesh, site: Site, dtype: torch.dtype
) -> VocabEmbedding | None:
    if not mesh.is_first_stage:
        return None
    # Rounded as the checkpoint's authors computed with it.
    scale = torch.tensor(model.embedding_scale).to(dtype).item()
    return VocabEmbedding.load(site, EMBEDDING, model.vocab_size, model.hidden_size, scale=scale)


def _load_head(
    model: ModelConfig, mesh: Mesh, site: Site, embedding: VocabEmbedding | None
) -> LmHead | None:
    """A tied model's head is its embedding: shared where both are here, else loaded for it."""
    if not mesh.is_last_stage:
        return None
    vocab, valid, cap = model.vocab_size, model.valid_vocab_size, model.final_soft_cap
    if model.tie_word_embeddings and embedding is not None:
        return LmHead.tied(site, embedding, vocab, valid=valid, soft_cap=cap)
    name = EMBEDDING if model.tie_word_embeddings else HEAD
    return LmHead.load(site, name, vocab, model.hidden_size, valid=valid, soft_cap=cap)
