"""What a step has alive at once beside weights and KV, as engines' own profilers see it.

C hidden, I inner width of a rank, V vocabulary, T tokens of a chunk, S sequences of a step.
"""

from __future__ import annotations

import msgspec

from ekiden.engine.step_bytes import GATHERED_TOKENS, layer_bytes, logit_bytes, shared_bytes
from ekiden.parallel.split import even_part, head_split
from ekiden.planner.geometry import Geometry
from ekiden.planner.layout import Layout
from ekiden.planner.limits import Resolved
from ekiden.planner.parts import (
    AnyAttention,
    Attention,
    LatentAttention,
    Layer,
    LinearAttention,
    Moe,
)
from ekiden.planner.precision import KV_BYTES, SCALE_BYTES

ACTIVATION_BYTES = 2
"""Of a number of a hidden state: engines compute in 16 bits, whatever form weights have."""


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank at the worst moment of a step: a whole chunk, or a whole batch sampled."""

    activations: int
    sampler: int


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """For which rank of which replica a peak is asked."""

    geometry: Geometry
    layout: Layout
    limits: Resolved
    tp_rank: int = 0
    last: bool = True
    """Whether the rank is on the last stage, which samples."""
    kv_dtype: str = "bf16"


def chunk_or_sampler(asked: Asked, sampler_bytes: float) -> Peak:
    """vLLM's profiler: one step of a full chunk, then all sequences sampled on what is left of it.

    In the chunk the widest moment is the gated MLP's: both ways and their product (3 I), the
    hidden state and the residual (2 C). While sampling only the hidden state of the chunk is alive
    beside ``sampler_bytes`` for each logit.
    """
    geometry, limits = asked.geometry, asked.limits
    tokens = limits.chunk * ACTIVATION_BYTES
    inner = max(_inner(layer, geometry.hidden, asked.layout) for layer in geometry.kinds)
    chunk = tokens * (inner + 2 * geometry.hidden)
    sampler = int(limits.max_num_seqs * geometry.vocab * sampler_bytes) if asked.last else 0
    hidden = tokens * geometry.hidden
    if chunk >= hidden + sampler:
        return Peak(activations=chunk, sampler=0)
    return Peak(activations=hidden, sampler=sampler)


def _inner(layer: Layer, hidden: int, layout: Layout) -> int:
    """Numbers of a token inside a layer's MLP; a MoE layer computes every token ``top_k`` times."""
    mlp = layer.mlp
    if not isinstance(mlp, Moe):
        return 3 * -(-mlp.inner // layout.tp)
    inner = -(-mlp.inner // layout.expert_tp)
    return mlp.top_k * (max(2 * inner, hidden) + inner)


def ours(asked: Asked) -> Peak:
    """This engine on a card: what ``ekiden.engine.activations`` foretells before a start."""
    step = asked.limits.chunk * asked.geometry.hidden * ACTIVATION_BYTES
    links = shared_bytes(step=step, tp=asked.layout.tp, pp=asked.layout.pp)
    layer = max(_our_layer(asked, layer) for layer in asked.geometry.kinds)
    logits = _our_logits(asked)
    if layer >= logits:
        return Peak(activations=layer + links, sampler=0)
    return Peak(activations=links, sampler=logits)


def _our_layer(asked: Asked, layer: Layer) -> int:
    times = layer.mlp.top_k if isinstance(layer.mlp, Moe) else 1
    queries, qkv = _widths(layer.attention, asked)
    return layer_bytes(
        tokens=asked.limits.chunk,
        hidden=asked.geometry.hidden,
        queries=queries,
        qkv=qkv,
        inner=even_part(layer.mlp.inner, asked.layout.tp, asked.tp_rank) * times,
        gathered=_our_gathered(layer.attention, asked),
        width=ACTIVATION_BYTES,
    )


def _widths(attention: AnyAttention, asked: Asked) -> tuple[int, int]:
    """Numbers of a token in the queries of a rank, and in its queries, keys and values."""
    tp, rank = asked.layout.tp, asked.tp_rank
    if isinstance(attention, LinearAttention):
        channels = even_part(attention.channels, tp, rank)
        return even_part(attention.key_heads * attention.key_dim, tp, rank), channels
    if isinstance(attention, LatentAttention):
        heads = even_part(attention.heads, tp, rank)
        q = heads * (attention.nope_dim + attention.rope_dim)
        return q, 2 * q + heads * attention.v_dim
    shares = head_split(attention.heads, attention.kv_heads, tp)[rank]
    q = shares.num_q * attention.head_dim
    return q, q + 2 * shares.num_kv * attention.head_dim


def _our_gathered(attention: AnyAttention, asked: Asked) -> int:
    """One layer's keys and values of the longest sequence, as plain attention gathers them."""
    if not isinstance(attention, Attention):
        return 0
    heads = head_split(attention.heads, attention.kv_heads, asked.layout.tp)[asked.tp_rank]
    scale = SCALE_BYTES if KV_BYTES[asked.kv_dtype] == 1 else 0
    row = attention.head_dim * KV_BYTES[asked.kv_dtype] + scale
    return min(asked.limits.max_model_len, GATHERED_TOKENS) * 2 * heads.num_kv * row


def _our_logits(asked: Asked) -> int:
    if not asked.last:
        return 0
    rows = min(asked.limits.max_num_seqs, asked.limits.chunk)
    return logit_bytes(
        rows=rows, vocab=asked.geometry.vocab, tp=asked.layout.tp, tp_rank=asked.tp_rank
    )
