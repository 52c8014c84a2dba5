"""Grouped-query attention over the paged cache, heads split over the TP ranks.

Shapes: T tokens, C hidden size, N query heads, D head dim; heads of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ekiden.layers.batch import ForwardBatch
from ekiden.layers.linear import ColumnLinear, RowLinear
from ekiden.layers.ops import AttentionKind, HeadNorm, HeadShape, Ops, WidthNorm
from ekiden.layers.rope import Rotation
from ekiden.layers.site import Site
from ekiden.parallel.communicator import Communicator
from ekiden.parallel.split import HeadShare, head_split


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The whole layer, before any split. Heads are counted over all ranks."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: str
    """Normalise q and k before they are rotated: each ``head``, or the ``whole`` width; or not."""
    norm_eps: float
    norm_offset: float
    """Added to the stored weights of those norms."""
    kind: AttentionKind


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """One layer's attention on one rank."""

    shape: HeadShape
    kind: AttentionKind
    qkv: ColumnLinear
    out: RowLinear
    ops: Ops
    tp: Communicator
    width_norm: WidthNorm | None

    @classmethod
    def load(cls, site: Site, prefix: str, spec: AttentionSpec, *, layer: int) -> Attention:
        """``layer`` counts the layers of this rank's cache.

        Raises:
            SetupError: as the source does, or where TP passes the query heads.
        """
        share = head_split(spec.num_heads, spec.num_kv_heads, site.tp.size)[site.tp.rank]
        dim = spec.head_dim
        return cls(
            shape=HeadShape(share.num_q, share.num_kv, dim, layer, _norm(site, prefix, spec)),
            kind=spec.kind,
            qkv=_qkv(site, prefix, spec, share),
            out=RowLinear.load(
                site,
                f"{prefix}.o_proj",
                (spec.hidden, spec.num_heads * dim),
                (share.q_start * dim, share.q_stop * dim),
                bias=spec.o_bias,
            ),
            ops=site.ops,
            tp=site.tp,
            width_norm=_width_norm(site, prefix, spec, share) if spec.qk_norm == "whole" else None,
        )

    def __call__(
        self, hidden_TC: Tensor, rotation: Rotation, batch: ForwardBatch, cache: Tensor
    ) -> Tensor:
        """[T, C] to [T, C]; writes this step's keys and values into ``cache``."""
        qkv_TE = self.qkv(hidden_TC)
        if self.width_norm is not None:
            qkv_TE = self.ops.width_norm(qkv_TE, self.width_norm, self.tp)
        q_TND = self.ops.rotate_and_store(qkv_TE, self.shape, rotation, cache, batch)
        attended_TND = self.ops.attend(q_TND, cache, self.shape.layer, batch, self.kind)
        return self.out(attended_TND.flatten(1))


def _qkv(site: Site, prefix: str, spec: AttentionSpec, share: HeadShare) -> ColumnLinear:
    dim = spec.head_dim
    q_rows = (share.q_start * dim, share.q_stop * dim)
    kv_rows = (share.kv_start * dim, share.kv_stop * dim)
    pieces = [
        (f"{prefix}.q_proj", spec.num_heads * dim, q_rows),
        (f"{prefix}.k_proj", spec.num_kv_heads * dim, kv_rows),
        (f"{prefix}.v_proj", spec.num_kv_heads * dim, kv_rows),
    ]
    return ColumnLinear.load(site, pieces, spec.hidden, bias=spec.qkv_bias)


def _norm(site: Site, prefix: str, spec: AttentionSpec) -> HeadNorm | None:
    if spec.qk_norm != "head":
        return None
    names, offset = ("q_norm", "k_norm"), spec.norm_offset
    q_D, k_D = (
        site.source.take(f"{prefix}.{name}.weight", (spec.head_dim,)).float() for name in names
    )
    if offset:
        q_D, k_D = q_D + offset, k_D + offset
    return HeadNorm(q_D, k_D, spec.norm_eps)


def _width_norm(site: Site, prefix: str, spec: AttentionSpec, share: HeadShare) -> WidthNorm:
    dim = spec.head_dim
    parts = [
        ("q_norm", spec.num_heads, share.q_start, share.q_stop),
        ("k_norm", spec.num_kv_heads, share.kv_start, share.kv_stop),
    ]
    weights = [
        site.source.take(f"{prefix}.{name}.weight", (heads * dim,), rows=(first * dim, last * dim))
        for name, heads, first, last in parts
    ]
    holders = head_split(spec.num_heads, spec.num_kv_heads, site.tp.size)
    return WidthNorm(
        weights[0].float(),
        weights[1].float(),
        widths=(spec.num_heads * dim, spec.num_kv_heads * dim),
        counts_k=holders.index(next(h for h in holders if h.kv_start == share.kv_start))
        == site.tp.rank,
        eps=spec.norm_eps,
    )
