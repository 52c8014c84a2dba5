"""Matrices split over the TP ranks, in the manner of Megatron-LM (arXiv:1909.08053).

Shapes: T tokens; ``in`` and ``out`` are what this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.weights import Range, WeightSource
from ekiden.parallel.communicator import Communicator


class ColumnLinear:
    """Some outputs of one or several matrices over the same input: ``[T, in] -> [T, out]``.

    Merged pieces (q, k and v; gate and up) come out side by side, in order.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def load(
        cls,
        source: WeightSource,
        pieces: Sequence[tuple[str, int, Range]],
        in_features: int,
        *,
        bias: bool,
    ) -> ColumnLinear:
        """``pieces`` are (name, outputs of the whole matrix, outputs of this rank).

        Raises:
            SetupError: as ``WeightSource.take``.
        """
        weights = [
            source.take(f"{name}.weight", (outputs, in_features), rows=rows)
            for name, outputs, rows in pieces
        ]
        biases = [
            source.take(f"{name}.bias", (outputs,), rows=rows)
            for name, outputs, rows in pieces
            if bias
        ]
        return cls(torch.cat(weights), torch.cat(biases) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowLinear:
    """Some inputs of a matrix; ranks add up their parts: ``[T, in] -> [T, whole out]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tp: Communicator) -> None:
        self.weight = weight
        self.bias = bias
        self.tp = tp

    @classmethod
    def load(
        cls,
        source: WeightSource,
        name: str,
        shape: tuple[int, int],
        columns: Range,
        tp: Communicator,
        *,
        bias: bool,
    ) -> RowLinear:
        """``shape`` is the whole matrix's [out, in]; ``columns`` are this rank's inputs.

        Raises:
            SetupError: as ``WeightSource.take``.
        """
        weight = source.take(f"{name}.weight", shape, columns=columns)
        return cls(weight, source.take(f"{name}.bias", shape[:1]) if bias else None, tp)

    def __call__(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        total = self.tp.all_reduce(F.linear(x, self.weight))
        # The bias comes after the sum, or it would be counted once a rank.
        return total if self.bias is None else total + self.bias
