"""The Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. What differs is in ``ModelConfig``.

Shapes: T tokens, C hidden size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ekiden.layers.attention import Attention, AttentionSpec
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.mlp import GatedMlp
from ekiden.layers.norm import RMSNorm
from ekiden.layers.rope import Rope, Rotation
from ekiden.layers.vocab import LmHead, VocabEmbedding
from ekiden.layers.weights import WeightSource
from ekiden.models.config import ModelConfig
from ekiden.models.layout import layer_split
from ekiden.models.rope import build_rope
from ekiden.parallel.mesh import Mesh

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_RECOMPUTED = ".rotary_emb.inv_freq"
"""Old checkpoints store the rotary frequencies; they follow from config.json."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderLayer:
    """Attention and MLP, each behind a norm and added to its input."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMlp

    def __call__(
        self, hidden_TC: Tensor, rotation: Rotation, batch: ForwardBatch, cache: Tensor
    ) -> Tensor:
        attended_TC = self.attention(self.attention_norm(hidden_TC), rotation, batch, cache)
        hidden_TC = hidden_TC + attended_TC
        return hidden_TC + self.mlp(self.mlp_norm(hidden_TC))


class LlamaModel:
    """One rank's part: the layers of its stage, its slice of each, the ends where it has them."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        mesh: Mesh,
        rope: Rope,
        dtype: torch.dtype,
        layers: list[DecoderLayer],
        embedding: VocabEmbedding | None,
        norm: RMSNorm | None,
        head: LmHead | None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.rope = rope
        self.dtype = dtype
        self.layers = layers
        self.embedding = embedding
        self.norm = norm
        self.head = head

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: Tensor) -> Tensor | None:
        """One step of this rank, hand-over between stages included.

        Writes the step's keys and values into ``cache``, this rank's own. Returns float32
        logits [R, V] on TP rank 0 of the last stage, None on every other rank.

        Raises:
            ReplicaFailed: another rank of the mesh did not come in time, or gave up.
        """
        hidden_TC = self._enter(batch)
        rotation = self.rope.rotation(batch.positions_T)
        for layer in self.layers:
            hidden_TC = layer(hidden_TC, rotation, batch, cache)
        if self.norm is None or self.head is None:
            self.mesh.pp.send(hidden_TC)
            return None
        if not len(batch.logit_rows_R):
            return None
        return self.head(self.norm(hidden_TC[batch.logit_rows_R]))

    def _enter(self, batch: ForwardBatch) -> Tensor:
        if self.embedding is not None:
            return self.embedding(batch.tokens_T)
        shape = (len(batch.tokens_T), self.model.hidden_size)
        return self.mesh.pp.recv(shape, self.dtype, batch.tokens_T.device)


def load_stage(
    model: ModelConfig,
    mesh: Mesh,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
) -> LlamaModel:
    """Take this rank's slices from ``source``.

    Raises:
        SetupError: a weight is missing or has another shape, or the split cannot work.
    """
    first, last = layer_split(model, mesh.pp.size)[mesh.pp_rank]
    embedding = _load_embedding(model, mesh, source)
    return LlamaModel(
        model=model,
        mesh=mesh,
        rope=build_rope(model.rope, model.head_dim, device),
        dtype=dtype,
        layers=[_load_layer(model, mesh, source, i, i - first) for i in range(first, last)],
        embedding=embedding,
        norm=_load_norm(model, source, FINAL_NORM) if mesh.is_last_stage else None,
        head=_load_head(model, mesh, source, embedding),
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


def _load_layer(
    model: ModelConfig, mesh: Mesh, source: WeightSource, index: int, local: int
) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    spec = AttentionSpec(
        hidden=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        qkv_bias=model.qkv_bias,
        o_bias=model.o_bias,
        qk_norm_eps=model.rms_norm_eps if model.qk_norm else None,
    )
    return DecoderLayer(
        attention_norm=_load_norm(model, source, f"{prefix}.input_layernorm.weight"),
        attention=Attention.load(
            source,
            f"{prefix}.self_attn",
            spec,
            mesh.tp,
            layer=local,
            window=model.windows[index],
        ),
        mlp_norm=_load_norm(model, source, f"{prefix}.post_attention_layernorm.weight"),
        mlp=GatedMlp.load(
            source,
            f"{prefix}.mlp",
            model.hidden_size,
            model.intermediate_size,
            mesh.tp,
            bias=model.mlp_bias,
        ),
    )


def _load_norm(model: ModelConfig, source: WeightSource, name: str) -> RMSNorm:
    return RMSNorm(source.take(name, (model.hidden_size,)), model.rms_norm_eps)


def _load_embedding(model: ModelConfig, mesh: Mesh, source: WeightSource) -> VocabEmbedding | None:
    if not mesh.is_first_stage:
        return None
    return VocabEmbedding.load(source, EMBEDDING, model.vocab_size, model.hidden_size, mesh.tp)


def _load_head(
    model: ModelConfig, mesh: Mesh, source: WeightSource, embedding: VocabEmbedding | None
) -> LmHead | None:
    """A tied model's head is its embedding: shared where both are here, else loaded for it."""
    if not mesh.is_last_stage:
        return None
    vocab, valid = model.vocab_size, model.valid_vocab_size
    if model.tie_word_embeddings and embedding is not None:
        return LmHead(embedding.weight, vocab, valid, mesh.tp)
    name = EMBEDDING if model.tie_word_embeddings else HEAD
    return LmHead.load(source, name, vocab, model.hidden_size, mesh.tp, valid=valid)
