"""Where layers get their weights from. A layer asks for its own slice and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Range = tuple[int, int]
"""[start, stop)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseWeight:
    """A matrix [out, in] in a float dtype; ``scale`` float32 [out] multiplies each output."""

    values: Tensor
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


LinearWeight = DenseWeight
"""One matrix in whatever form its checkpoint, or the user, wants it."""


class WeightSource(Protocol):
    """A checkpoint, as layers see it."""

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

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> LinearWeight:
        """The part of matrix ``name`` (``name.weight`` or its quantised form), as ``take``."""


def join(weights: Sequence[LinearWeight]) -> LinearWeight:
    """Matrices over the same input side by side, outputs in order."""
    if len(weights) == 1:
        return weights[0]
    scales = [w.scale for w in weights if w.scale is not None]
    return DenseWeight(
        values=torch.cat([w.values for w in weights]),
        scale=torch.cat(scales) if scales else None,
    )
