"""A directory of safetensors files as a source of weights: each rank reads its own slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ekiden.core.errors import SetupError
from ekiden.layers.weights import LinearWeight, Range
from ekiden.models.checkpoint import Checkpoint, TensorInfo
from ekiden.models.forms import AsIs, Form
from ekiden.models.mapped import read_slice
from ekiden.models.stored import Part

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
        form: Form | None = None,
    ) -> None:
        """``form`` is that of matrices; None: as they are."""
        self._checkpoint = checkpoint
        self._form = form or AsIs()
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
        """As ``TensorSource.take``."""
        info = self._find(name, shape, _READABLE)
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
        return self._form.linear(self, _part(name, shape, rows, columns))

    def head(self, name: str, shape: tuple[int, int], *, rows: Range) -> LinearWeight:
        """As ``WeightSource.head``."""
        return self._form.head(self, _part(name, shape, rows, None))

    def tied_head(self, table_VC: Tensor) -> LinearWeight:
        """As ``WeightSource.tied_head``."""
        return self._form.tied_head(table_VC)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def has(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """As ``stored.Files``, and so the three below."""
        return self._checkpoint.tensors[name].shape

    def stored(
        self,
        name: str,
        shape: Sequence[int],
        dtypes: Sequence[str],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
    ) -> Tensor:
        info = self._find(name, shape, dtypes)
        tensor = read_slice(info, rows=rows, columns=columns, device=self._device)
        self._account(name)
        return tensor

    def is_zero(self, name: str) -> bool:
        if not self.has(name):
            return False
        tensor = read_slice(self._checkpoint.tensors[name], device=self._device)
        return tensor.is_meta or not bool(tensor.any())

    def pass_by(self, name: str) -> None:
        self._account(name)

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

    def _find(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> TensorInfo:
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise SetupError(f"{self._checkpoint.path} holds no tensor {name}: weights are missing")
        if info.shape != tuple(shape):
            raise SetupError(
                f"{info.file}: {name} has shape {list(info.shape)}, and config.json makes it "
                f"{list(shape)}"
            )
        if info.dtype not in dtypes:
            raise SetupError(
                f"{info.file}: {name} is stored as {info.dtype}: only {', '.join(dtypes)} "
                "can be read"
            )
        return info

    def _account(self, name: str) -> None:
        self._left.pop(name, None)
        if self._progress is not None:
            self._progress(self._total - sum(self._left.values()), self._total)


def _part(name: str, shape: tuple[int, int], rows: Range | None, columns: Range | None) -> Part:
    return Part(name, shape, rows or (0, shape[0]), columns or (0, shape[1]))
