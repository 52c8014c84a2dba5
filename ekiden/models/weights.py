"""A directory of safetensors files as a source of weights: each rank reads its own slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ekiden.core.errors import SetupError
from ekiden.layers.weights import DenseWeight, LinearWeight, Range
from ekiden.models.checkpoint import Checkpoint
from ekiden.models.mapped import read_slice

Progress = Callable[[int, int], None]
"""(bytes of checkpoint done, bytes of checkpoint that this rank's stage needs)."""

_READABLE = ("F32", "BF16", "F16", "F64")


class SafetensorsSource:
    """``WeightSource`` over a checkpoint. ``wanted`` says which tensors this stage must read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        wanted: Callable[[str], bool],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        sizes = {name: info.stop - info.start for name, info in checkpoint.tensors.items()}
        self._left = {name: size for name, size in sizes.items() if wanted(name)}
        self._total = sum(self._left.values())

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> Tensor:
        """As ``WeightSource.take``."""
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise SetupError(f"{self._checkpoint.path} holds no tensor {name}: weights are missing")
        if info.shape != tuple(shape):
            raise SetupError(
                f"{info.file}: {name} has shape {list(info.shape)}, and config.json makes it "
                f"{list(shape)}"
            )
        if info.dtype not in _READABLE:
            raise SetupError(
                f"{info.file}: {name} is stored as {info.dtype}: only {', '.join(_READABLE)} "
                "can be read"
            )
        tensor = read_slice(
            info, rows=rows, columns=columns, dtype=self._dtype, device=self._device
        )
        self._account(name)
        return tensor

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> LinearWeight:
        """As ``WeightSource.linear``."""
        return DenseWeight(values=self.take(f"{name}.weight", shape, rows=rows, columns=columns))

    def finish(self) -> None:
        """Check that the stage has used all that the checkpoint has for it.

        Raises:
            SetupError: tensors were left over: the model would compute without them.
        """
        if self._left:
            names = sorted(self._left)
            first = self._checkpoint.tensors[names[0]]
            raise SetupError(
                f"{first.file} holds {names[0]}, which this model has no place for "
                f"({len(names)} such tensors): config.json and weights do not belong together"
            )

    def _account(self, name: str) -> None:
        self._left.pop(name, None)
        if self._progress is not None:
            self._progress(self._total - sum(self._left.values()), self._total)
