"""Where layers get their weights from. A layer asks for its own slice and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ekiden.core.errors import SetupError

Range = tuple[int, int]
"""[start, stop)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseWeight:
    """A matrix [out, in] in a float dtype; ``scale`` float32 [out] multiplies each output.

    With a scale the values may be float8_e4m3fn, which bfloat16 holds exactly.
    """

    values: Tensor
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedWeight:
    """A matrix [out, in] of small whole numbers, a scale and a zero for each run of inputs.

    Element [o, i] is ``(values[o, i] - zeros[o, g]) * scales[o, g]``, g = i // group_size. What
    stands in column i multiplies input ``order[i]``, or input i where there is no order.
    """

    values: Tensor
    """uint8 [out, in], one number an element, below 2 ** bits."""
    scales: Tensor
    """float32 [out, groups], and numbers that float16 holds unless the checkpoint's are not."""
    zeros: Tensor
    """uint8 [out, groups]."""
    bits: int
    """4 or 8."""
    group_size: int
    """in / groups."""
    order: Tensor | None = None
    """int64 [in], a permutation; GPTQ sorts inputs by their group (``desc_act``)."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


LinearWeight: TypeAlias = DenseWeight | GroupedWeight
"""One matrix in whatever form its checkpoint, or the user, wants it."""


class TensorSource(Protocol):
    """Tensors of floats by their names."""

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> Tensor:
        """``name[rows, columns]``, contiguous, in the model's dtype and on its device.

        ``shape`` is the whole tensor's; None takes every row or column.

        Raises:
            SetupError: no such tensor, another shape, or a dtype that is not a float's; the
                message names the file and the tensor.
        """


class WeightSource(TensorSource, Protocol):
    """A checkpoint, as layers see it."""

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> LinearWeight:
        """The part of matrix ``name`` (``name.weight`` or its quantised form), as ``take``.

        Raises:
            SetupError: also where a quantised matrix cannot be cut at these columns.
        """

    def head(self, name: str, shape: tuple[int, int], *, rows: Range) -> LinearWeight:
        """As ``linear`` for the output matrix over the vocabulary, which has a form of its own."""

    def tied_head(self, table_VC: Tensor) -> LinearWeight:
        """The output matrix whose rows are the embedding's, ``table_VC`` of it, in that form."""


def join(weights: Sequence[LinearWeight]) -> LinearWeight:
    """Matrices over the same input side by side, outputs in order.

    Raises:
        SetupError: they are not of one kind, so no single product can be made of them.
    """
    if len(weights) == 1:
        return weights[0]
    dense = [w for w in weights if isinstance(w, DenseWeight)]
    grouped = [w for w in weights if isinstance(w, GroupedWeight)]
    if len(dense) == len(weights) and len({_kind(w) for w in dense}) == 1:
        scales = [w.scale for w in dense if w.scale is not None]
        return DenseWeight(
            values=torch.cat([w.values for w in dense]),
            scale=torch.cat(scales) if scales else None,
        )
    if len(grouped) == len(weights) and len({_kind(w) for w in grouped}) == 1:
        return _join_grouped(grouped)
    kinds = "; ".join(_kind(w) for w in weights)
    raise SetupError(
        f"matrices over the same input are quantised in different ways ({kinds}): "
        "quantise q, k and v, and gate and up, alike"
    )


def _join_grouped(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    first = weights[0]
    for other in weights[1:]:
        if not _same_order(first.order, other.order):
            raise SetupError(
                "matrices over the same input were quantised with their inputs in different "
                "orders (desc_act): quantise q, k and v, and gate and up, together"
            )
    return GroupedWeight(
        values=torch.cat([w.values for w in weights]),
        scales=torch.cat([w.scales for w in weights]),
        zeros=torch.cat([w.zeros for w in weights]),
        bits=first.bits,
        group_size=first.group_size,
        order=first.order,
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    """Both are there or neither is; on ``meta`` there are no numbers that could differ."""
    if one is None or other is None:
        return one is other
    return one.is_meta or torch.equal(one, other)


def _kind(weight: LinearWeight) -> str:
    if isinstance(weight, DenseWeight):
        dtype = str(weight.values.dtype).removeprefix("torch.")
        return f"{dtype} with scales" if weight.scale is not None else dtype
    ordered = "" if weight.order is None else ", inputs sorted"
    return f"int{weight.bits} in groups of {weight.group_size}{ordered}"
