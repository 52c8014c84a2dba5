"""Matrices split over the TP ranks, in the manner of Megatron-LM (arXiv:1909.08053).

Shapes: T tokens; ``in`` and ``out`` are what this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ekiden.layers.ops import Linear
from ekiden.layers.site import Site
from ekiden.layers.weights import Range, join


class ColumnLinear:
    """Some outputs of one or several matrices over the same input: ``[T, in] -> [T, out]``.

    Merged pieces (q, k and v; gate and up) come out side by side, in order.
    """

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    @classmethod
    def load(
        cls, site: Site, pieces: Sequence[tuple[str, int, Range]], in_features: int, *, bias: bool
    ) -> ColumnLinear:
        """``pieces`` are (name, outputs of the whole matrix, outputs of this rank).

        Raises:
            SetupError: as ``TensorSource.take``.
        """
        weights = [
            site.source.linear(name, (outputs, in_features), rows=rows)
            for name, outputs, rows in pieces
        ]
        biases = [
            site.source.take(f"{name}.bias", (outputs,), rows=rows)
            for name, outputs, rows in pieces
            if bias
        ]
        return cls(site.ops.linear(join(weights), torch.cat(biases) if bias else None))

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)


class RowLinear:
    """Some inputs of a matrix; ranks add up their parts: ``[T, in] -> [T, whole out]``.

    The bias is added on the first rank alone, or it would be counted once a rank.
    """

    def __init__(self, linear: Linear, site: Site) -> None:
        self.linear = linear
        self.tp = site.tp
        self.ops = site.ops

    @classmethod
    def load(
        cls, site: Site, name: str, shape: tuple[int, int], columns: Range, *, bias: bool
    ) -> RowLinear:
        """``shape`` is the whole matrix's [out, in]; ``columns`` are this rank's inputs.

        Raises:
            SetupError: as ``TensorSource.take``.
        """
        weight = site.source.linear(name, shape, columns=columns)
        added = site.source.take(f"{name}.bias", shape[:1]) if bias else None
        return cls(site.ops.linear(weight, added if site.tp.rank == 0 else None), site)

    def __call__(self, x: Tensor) -> Tensor:
        part = self.linear(x)
        return part if self.tp.size == 1 else self.ops.all_reduce(part, self.tp)
