"""Bytes of weights of every rank, from shapes alone, and of a checkpoint that lies on a disk."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from pathlib import Path

import msgspec

from ekiden.models.checkpoint import Checkpoint
from ekiden.planner.geometry import Geometry
from ekiden.planner.layout import Layout, local, same_part, stages
from ekiden.planner.matrices import INNER, VOCAB, Matrix, column
from ekiden.planner.parts import LatentAttention, Layer
from ekiden.planner.precision import WeightFormat


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds beside or instead of what is in the checkpoint."""

    vocab_multiple: int = 1
    """The vocabulary is padded to this before it is cut."""
    mx_inputs_multiple: int = 1
    """Inputs of matrices in MXFP4 are padded to this by the kernels."""
    rope_table: bool = False
    """Cosines and sines of every position, in the model's dtype."""
    absorbs_latent: bool = False
    """MLA's kv_b_proj is held a second time, as floats, to be multiplied into q and the output
    (arXiv:2405.04434 section 2.1.2)."""
    balanced_stages: bool = True


def rank_weights(
    geometry: Geometry, layout: Layout, form: WeightFormat, holding: Holding | None = None
) -> tuple[int, ...]:
    """Bytes of each rank, stage after stage; tied ends are held where used."""
    return _rank_weights(geometry, layout, form, holding or Holding())


@lru_cache(maxsize=512)
def _rank_weights(
    geometry: Geometry, layout: Layout, form: WeightFormat, holding: Holding
) -> tuple[int, ...]:
    bounds = stages(geometry, layout.pp, balanced=holding.balanced_stages)
    experts = geometry.experts
    found: list[int] = []
    for stage in range(layout.pp):
        alike: dict[tuple[int, int, int], int] = {}
        for rank in range(layout.stage_gpus):
            key = same_part(experts, layout, rank)
            if key not in alike:
                alike[key] = _rank(geometry, layout, form, holding, bounds[stage], rank)
            found.append(alike[key])
    return tuple(found)


def _rank(
    geometry: Geometry,
    layout: Layout,
    form: WeightFormat,
    holding: Holding,
    bounds: tuple[int, int],
    rank: int,
) -> int:
    start, stop = bounds
    last = len(geometry.layers) - 1
    wide_ends = {0, last} if form.ends_wide else set()
    kinds = Counter(
        (layer, index in wide_ends)
        for index, layer in enumerate(geometry.layers[start:stop], start)
    )
    held = form.padded(holding.mx_inputs_multiple) if form.is_mx else form
    total = sum(
        count * _layer(geometry, layer, layout, held, rank, wide)
        for (layer, wide), count in kinds.items()
    )
    if holding.absorbs_latent:
        total += sum(_absorbed(geometry.layers[i], layout, form, rank) for i in range(start, stop))
    if holding.rope_table:
        total += geometry.max_positions * geometry.rotary_dim * form.wide
    return total + _ends(geometry, layout, form, holding, rank, start == 0, stop > last)


def _layer(
    geometry: Geometry, layer: Layer, layout: Layout, form: WeightFormat, rank: int, wide: bool
) -> int:
    matrices = layer.matrices(geometry.hidden)
    return sum(
        form.bytes_of(local(matrix, layer.attention, layout, rank), wide=wide)
        for matrix in matrices
    )


def _absorbed(layer: Layer, layout: Layout, form: WeightFormat, rank: int) -> int:
    attention = layer.attention
    if not isinstance(attention, LatentAttention):
        return 0
    made = next(m for m in attention.matrices(1) if m.name == "kv_b_proj")
    return local(made, attention, layout, rank).elements * form.wide


def _ends(
    geometry: Geometry,
    layout: Layout,
    form: WeightFormat,
    holding: Holding,
    rank: int,
    first: bool,
    last: bool,
) -> int:
    """Embedding, positions and towers on the first stage, norm and head on the last."""
    found = geometry.ends()
    kept = [m for m in found if (first if m.name in ("embed_tokens", "positions") else last)]
    if geometry.tied and last and not first:
        kept.append(found[0])  # The head is the embedding, and another stage has that.
    if first and geometry.tower_parameters:
        kept += column("towers", "tower", geometry.tower_parameters, 1, INNER)
    attention = geometry.layers[0].attention
    return sum(
        form.bytes_of(local(_padded(m, holding.vocab_multiple), attention, layout, rank))
        for m in kept
    )


def _padded(matrix: Matrix, multiple: int) -> Matrix:
    if matrix.cut != VOCAB:
        return matrix
    return msgspec.structs.replace(matrix, rows=-(-matrix.rows // multiple) * multiple)


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers of a checkpoint say."""

    elements: int
    """Of float tensors; packed ones hold several numbers an element."""
    bytes: int

    def differs(self, expected: int) -> float:
        """How far the checkpoint is from ``expected`` bytes, as a share of its own."""
        return (expected - self.bytes) / self.bytes


def stored(directory: Path) -> Stored:
    """Count the safetensors of a model directory by their headers; nothing else is read.

    Raises:
        SetupError: there are none, or one is broken.
    """
    tensors = Checkpoint.open(directory).tensors.values()
    floats = [t for t in tensors if t.dtype in ("F64", "F32", "F16", "BF16")]
    return Stored(
        elements=sum(math.prod(t.shape) for t in floats),
        bytes=sum(t.stop - t.start for t in tensors),
    )
