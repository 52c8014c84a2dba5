"""What is asked of a checkpoint by those who read its quantised matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ekiden.layers.weights import LinearWeight, Range, TensorSource

FLOATS = ("F32", "BF16", "F16")
"""What scales may be stored as."""


class Part(NamedTuple):
    """What a rank wants of the matrix ``name``: outputs ``rows`` and inputs ``columns``."""

    name: str
    shape: tuple[int, int]
    """Of the whole matrix, [out, in]."""
    rows: Range
    columns: Range

    @property
    def is_cut(self) -> bool:
        """Whether some of the inputs are another rank's."""
        return self.columns != (0, self.shape[1])


def cover(span: Range, unit: int) -> Range:
    """The least multiples of ``unit`` around [start, stop)."""
    return span[0] // unit * unit, -(-span[1] // unit) * unit


class Files(TensorSource, Protocol):
    """The tensors of a checkpoint, as they are stored too."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""

    def is_zero(self, name: str) -> bool:
        """Whether a tensor is there and holds zeros alone; it does not count as used."""

    def pass_by(self, name: str) -> None:
        """Count a tensor as used, if it is there, that nothing needs."""

    def stored(
        self,
        name: str,
        shape: Sequence[int],
        dtypes: Sequence[str],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> Tensor:
        """As ``take``, in the dtype of the file, which must be one of ``dtypes``."""


class Reader(Protocol):
    """Reads the matrices of one packing."""

    def holds(self, files: Files, name: str) -> bool:
        """Whether this matrix is quantised."""

    def read(self, files: Files, part: Part) -> LinearWeight:
        """Raises SetupError: shapes that do not fit, or a part that cannot be cut out."""
