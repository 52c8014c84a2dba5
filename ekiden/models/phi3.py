"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama's layers, with q, k, v and gate, up stored as one.

Only the file differs, so a view of it shows the parts under the names that the layers ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ekiden.layers.site import Site
from ekiden.layers.weights import LinearWeight, Range, WeightSource
from ekiden.models import llama
from ekiden.models.config import ModelConfig
from ekiden.models.decoder import DecoderLayer


class Part(NamedTuple):
    """Rows [first, first + count) of the stored matrix ``name`` of ``total`` rows."""

    name: str
    first: int
    total: int


class MergedSource:
    """``WeightSource`` that finds q_proj in qkv_proj, and so on."""

    def __init__(self, source: WeightSource, parts: dict[str, Part]) -> None:
        self._source = source
        self._parts = parts

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> Tensor:
        """As ``TensorSource.take``."""
        return self._source.take(name, shape, rows=rows, columns=columns)

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> LinearWeight:
        """As ``WeightSource.linear``."""
        prefix, _, last = name.rpartition(".")
        part = self._parts.get(last)
        if part is None:
            return self._source.linear(name, shape, rows=rows, columns=columns)
        start, stop = rows or (0, shape[0])
        return self._source.linear(
            f"{prefix}.{part.name}",
            (part.total, shape[1]),
            rows=(part.first + start, part.first + stop),
            columns=columns,
        )

    def head(self, name: str, shape: tuple[int, int], *, rows: Range) -> LinearWeight:
        """As ``WeightSource.head``."""
        return self._source.head(name, shape, rows=rows)

    def tied_head(self, table_VC: Tensor) -> LinearWeight:
        """As ``WeightSource.tied_head``."""
        return self._source.tied_head(table_VC)


def load_layer(model: ModelConfig, site: Site, index: int, local: int) -> DecoderLayer:
    merged = replace(site, source=MergedSource(site.source, merged_parts(model)))
    return llama.load_layer(model, merged, index, local)


def merged_parts(model: ModelConfig) -> dict[str, Part]:
    """Where each matrix lies in the one that the file stores."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inner = model.intermediate_size
    return {
        "q_proj": Part("qkv_proj", 0, q + 2 * kv),
        "k_proj": Part("qkv_proj", q, q + 2 * kv),
        "v_proj": Part("qkv_proj", q + kv, q + 2 * kv),
        "gate_proj": Part("gate_up_proj", 0, 2 * inner),
        "up_proj": Part("gate_up_proj", inner, 2 * inner),
    }
