"""Where layers get their weights from. A layer asks for its own slice and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Range = tuple[int, int]
"""[start, stop)."""


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
