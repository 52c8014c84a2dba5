"""Grouped-query attention over the paged cache, heads split over the TP ranks.

Shapes: T tokens, C hidden size, N query heads, K KV heads, D head dim; heads of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ekiden.cache.tensors import write_kv
from ekiden.layers.backends.cpu import paged_attention
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.linear import ColumnLinear, RowLinear
from ekiden.layers.norm import RMSNorm
from ekiden.layers.rope import Rotation, rotate
from ekiden.layers.weights import Range, WeightSource
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
    qk_norm_eps: float | None
    """Normalise every head of q and k (Qwen3); None where the model does not."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """One layer's attention on one rank: ``share`` says which heads are its own."""

    share: HeadShare
    head_dim: int
    qkv: ColumnLinear
    out: RowLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    layer: int
    """Index into the layers of this rank's cache."""
    window: int
    """Last positions that a token sees; 0 for all."""

    @classmethod
    def load(
        cls,
        source: WeightSource,
        prefix: str,
        spec: AttentionSpec,
        tp: Communicator,
        *,
        layer: int,
        window: int,
    ) -> Attention:
        """Raises SetupError as the source does, or where ``tp`` passes the query heads."""
        share = head_split(spec.num_heads, spec.num_kv_heads, tp.size)[tp.rank]
        q_rows = (share.q_start * spec.head_dim, share.q_stop * spec.head_dim)
        return cls(
            share=share,
            head_dim=spec.head_dim,
            qkv=_load_qkv(source, prefix, spec, share, q_rows),
            out=RowLinear.load(
                source,
                f"{prefix}.o_proj",
                (spec.hidden, spec.num_heads * spec.head_dim),
                q_rows,
                tp,
                bias=spec.o_bias,
            ),
            q_norm=_load_norm(source, f"{prefix}.q_norm.weight", spec),
            k_norm=_load_norm(source, f"{prefix}.k_norm.weight", spec),
            layer=layer,
            window=window,
        )

    def __call__(
        self, hidden_TC: Tensor, rotation: Rotation, batch: ForwardBatch, cache: Tensor
    ) -> Tensor:
        """[T, C] to [T, C]; writes this step's keys and values into ``cache``."""
        sizes = [self.share.num_q, self.share.num_kv, self.share.num_kv]
        qkv = self.qkv(hidden_TC).view(len(hidden_TC), -1, self.head_dim)
        q_TND, k_TKD, v_TKD = torch.split(qkv, sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_TND, k_TKD = self.q_norm(q_TND), self.k_norm(k_TKD)
        write_kv(cache, self.layer, rotate(k_TKD, rotation), v_TKD, batch.slots)
        groups = batch.groups(self.window)
        attended_TND = paged_attention(rotate(q_TND, rotation), cache, self.layer, groups)
        return self.out(attended_TND.flatten(1))


def _load_qkv(
    source: WeightSource, prefix: str, spec: AttentionSpec, share: HeadShare, q_rows: Range
) -> ColumnLinear:
    dim = spec.head_dim
    kv_rows = (share.kv_start * dim, share.kv_stop * dim)
    pieces = [
        (f"{prefix}.q_proj", spec.num_heads * dim, q_rows),
        (f"{prefix}.k_proj", spec.num_kv_heads * dim, kv_rows),
        (f"{prefix}.v_proj", spec.num_kv_heads * dim, kv_rows),
    ]
    return ColumnLinear.load(source, pieces, spec.hidden, bias=spec.qkv_bias)


def _load_norm(source: WeightSource, name: str, spec: AttentionSpec) -> RMSNorm | None:
    if spec.qk_norm_eps is None:
        return None
    return RMSNorm(source.take(name, (spec.head_dim,)), spec.qk_norm_eps)
