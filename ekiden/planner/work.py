"""What one step makes a rank do: bytes that it reads and operations, from shapes alone."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import msgspec

from ekiden.parallel.split import even_part, head_split
from ekiden.planner.geometry import Geometry
from ekiden.planner.kv import RankKv, rank_kv
from ekiden.planner.layout import Layout, local, stages
from ekiden.planner.matrices import HEADS, KV_HEADS
from ekiden.planner.memory import Replica
from ekiden.planner.parts import (
    AnyAttention,
    Attention,
    LatentAttention,
    Layer,
    LinearAttention,
    Moe,
)
from ekiden.planner.peaks import ACTIVATION_BYTES
from ekiden.planner.precision import WeightFormat, kv_format

LOG_SUM_BYTES = 4
"""Of the weight of a partial result, in float32."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of layers of one kind: operations for one token and one position that it sees, and
    bytes of a token of a prompt that another CP group needs."""

    layers: int
    window: int
    prefill: float
    decode: float
    kv_bytes: int = 0
    """Its keys and values, as they are kept."""
    query_bytes: int = 0
    partial_bytes: int = 0
    """What its queries find in one part of the context, and with what weight."""

    def seen(self, context: float) -> float:
        return min(context, self.window) if self.window else context


class StageWork(msgspec.Struct, frozen=True, kw_only=True):
    """Of the busiest ranks of one pipeline stage: of attention and of the rest each that rank which
    has most, since all wait for it after either. Bytes are read once a step, operations (a
    multiplication and an addition are two) are those of one token."""

    layers: int
    sparse_layers: int
    """With routed experts."""
    dense_bytes: int
    expert_bytes: int
    """Of all routed experts of the rank."""
    head_bytes: int
    small_flops: float
    """In matrices that the weight format makes small."""
    wide_flops: float
    expert_flops: float
    """Of a token of any rank of the group: the share of its experts that lies here."""
    head_flops: float
    """Of a row that is sampled."""
    scores: tuple[Scores, ...]
    kv: RankKv
    touch: float
    """Share of the experts that one token takes."""

    def touched(self, tokens: float) -> float:
        """Share of the experts that ``tokens`` take together: 1 - (1 - k/E)^tokens."""
        return float(1 - (1 - self.touch) ** tokens)


def stage_works(replica: Replica) -> tuple[StageWork, ...]:
    """Of each stage, in order."""
    return _stage_works(
        replica.geometry,
        replica.layout,
        replica.weights,
        kv_format(replica.kv_dtype),
        replica.profile.kv_scale_bytes,
        replica.profile.holding.balanced_stages,
    )


@lru_cache(maxsize=512)
def _stage_works(
    geometry: Geometry,
    layout: Layout,
    form: WeightFormat,
    kv_dtype: str,
    scale: int,
    balanced: bool,
) -> tuple[StageWork, ...]:
    group = layout.stage_gpus
    shapes = rank_kv(geometry, layout, kv_dtype, scale_bytes=scale, balanced=balanced)
    return tuple(
        _stage(geometry, layout, form, bounds, shapes[index * group])
        for index, bounds in enumerate(stages(geometry, layout.pp, balanced=balanced))
    )


def _stage(
    geometry: Geometry, layout: Layout, form: WeightFormat, bounds: tuple[int, int], kv: RankKv
) -> StageWork:
    kinds = Counter(geometry.layers[slice(*bounds)])
    sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
    for layer, count in kinds.items():
        for name, value in _layer(geometry, layer, layout, form).items():
            sums[name] += count * value
    last = bounds[1] == len(geometry.layers)
    head = -(-geometry.vocab // layout.tp) * geometry.hidden if last else 0
    return StageWork(
        layers=bounds[1] - bounds[0],
        sparse_layers=int(sums["sparse_layers"]),
        dense_bytes=int(sums["dense_bytes"]),
        expert_bytes=int(sums["expert_bytes"]),
        small_flops=sums["small_flops"],
        wide_flops=sums["wide_flops"],
        expert_flops=sums["expert_flops"],
        head_bytes=head * form.wide,
        head_flops=2.0 * head,
        scores=_scores(kinds, layout.tp, kv),
        kv=kv,
        touch=_touch(geometry),
    )


_SUMMED = (
    *("sparse_layers", "dense_bytes", "expert_bytes"),
    *("small_flops", "wide_flops", "expert_flops"),
)


def _layer(
    geometry: Geometry, layer: Layer, layout: Layout, form: WeightFormat
) -> dict[str, float]:
    sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
    heaviest, _ = busiest(layer.attention, layout.tp)
    for matrix in layer.matrices(geometry.hidden):
        rank = heaviest if matrix.cut in (HEADS, KV_HEADS) else 0
        part = local(matrix, layer.attention, layout, rank)
        if matrix.part == "expert":
            sums["expert_bytes"] += form.bytes_of(part)
            sums["expert_flops"] += 2 * part.elements
        else:
            sums["dense_bytes"] += form.bytes_of(part)
            sums["small_flops" if form.is_small(matrix) else "wide_flops"] += 2 * part.elements
    if isinstance(layer.mlp, Moe):
        sums["sparse_layers"] = 1
        sums["expert_flops"] *= layer.mlp.top_k / layer.mlp.experts
    return sums


def _touch(geometry: Geometry) -> float:
    return max(
        (x.mlp.top_k / x.mlp.experts for x in geometry.layers if isinstance(x.mlp, Moe)),
        default=0.0,
    )


def _scores(kinds: Counter[Layer], tp: int, kv: RankKv) -> tuple[Scores, ...]:
    alike: Counter[AnyAttention] = Counter()
    for layer, count in kinds.items():
        alike[layer.attention] += count
    return tuple(
        _of_kind(attention, count, tp, kept.token_bytes)
        for (attention, count), kept in zip(alike.items(), kv.kinds, strict=True)
    )


def _of_kind(attention: AnyAttention, layers: int, tp: int, kv_bytes: int) -> Scores:
    """Scores and their sum over values. MLA multiplies its latent vector in decode
    (arXiv:2405.04434 section 2.1.2), and whole keys in prefill."""
    if isinstance(attention, LinearAttention):  # Its state does not grow with what a token sees.
        return Scores(layers=layers, window=0, prefill=0.0, decode=0.0)
    _, heads = busiest(attention, tp)
    if isinstance(attention, LatentAttention):
        key, value = attention.nope_dim + attention.rope_dim, attention.v_dim
        seen = 2 * attention.kv_rank + attention.rope_dim
    else:
        key = value = attention.head_dim
        seen = key + value
    return Scores(
        layers=layers,
        window=attention.window,
        prefill=2.0 * heads * (key + value),
        decode=2.0 * heads * seen,
        kv_bytes=kv_bytes,
        query_bytes=heads * key * ACTIVATION_BYTES,
        partial_bytes=heads * (value * ACTIVATION_BYTES + LOG_SUM_BYTES),
    )


def busiest(attention: AnyAttention, tp: int) -> tuple[int, int]:
    """The rank with most query heads, and how many: not always the first, since where there are
    more ranks than KV heads the first of these have the more ranks each."""
    if not isinstance(attention, Attention):
        return 0, even_part(attention.heads, tp, 0)
    shares = head_split(attention.heads, attention.kv_heads, tp)
    rank = max(range(tp), key=lambda rank: shares[rank].num_q)
    return rank, shares[rank].num_q
