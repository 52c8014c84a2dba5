"""The form in which a model's matrices are held: as stored, or quantised while they are loaded.

Embeddings stay floats, since single rows are looked up. The output matrix over the vocabulary is
a third of a small model's weights: int8 and int4 hold it in 8 bits, fp8 leaves it as it is.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from ekiden.core.config import ON_LOAD
from ekiden.core.errors import SetupError
from ekiden.layers.quantised import cut_columns, group_size, quantise, quantise_e4m3
from ekiden.layers.weights import DenseWeight, LinearWeight
from ekiden.models.float8 import BytesReader
from ekiden.models.packed import PackedReader
from ekiden.models.quantization_config import METHODS, QuantizationConfig
from ekiden.models.stored import Files, Part, Reader, cover

HEAD_BITS = 8


class Form(Protocol):
    """How matrices get from a checkpoint into layers."""

    def linear(self, files: Files, part: Part) -> LinearWeight:
        """Raises SetupError as ``WeightSource.linear``."""

    def head(self, files: Files, part: Part) -> LinearWeight: ...

    def tied_head(self, table_VC: Tensor) -> LinearWeight: ...


def choose_form(stored: QuantizationConfig | None, wanted: str) -> Form:
    """``stored`` is the checkpoint's own; ``wanted`` is ``--quantization``.

    Raises:
        SetupError: they contradict each other.
    """
    if stored is not None and wanted in ("auto", stored.method):
        return AsStored(stored)
    if stored is not None:
        raise SetupError(
            f"--quantization {wanted}: the checkpoint is quantised already, by {stored.method}: "
            f"choose auto or {stored.method}, or take the checkpoint of floats"
        )
    if wanted in METHODS and wanted not in ON_LOAD:
        raise SetupError(
            f"--quantization {wanted}: the checkpoint's config.json has no quantization_config: "
            "choose auto to take it as it is, or int8, int4 or fp8 to quantise it"
        )
    return AsIs() if wanted == "auto" else OnLoad(wanted)


class AsIs:
    """Floats, in the model's dtype."""

    def linear(self, files: Files, part: Part) -> LinearWeight:
        name, shape, rows, columns = part
        # None: all of them, which is read in longer runs.
        cut = columns if part.is_cut else None
        return DenseWeight(values=files.take(f"{name}.weight", shape, rows=rows, columns=cut))

    def head(self, files: Files, part: Part) -> LinearWeight:
        return self.linear(files, part)

    def tied_head(self, table_VC: Tensor) -> LinearWeight:
        return DenseWeight(values=table_VC)


class AsStored(AsIs):
    """Each matrix as the checkpoint has it: quantised, or floats where its tool left them."""

    def __init__(self, config: QuantizationConfig) -> None:
        self.reader: Reader = (
            BytesReader(config) if config.packing in ("fp8", "bytes") else PackedReader(config)
        )

    def linear(self, files: Files, part: Part) -> LinearWeight:
        if not self.reader.holds(files, part.name):
            return super().linear(files, part)
        _pass_zero_bias(files, part)
        return self.reader.read(files, part)


class OnLoad(AsIs):
    """Quantised as it is read. Groups are the whole matrix's, whatever the split: every layout
    of a model computes with the same numbers."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.bits = {"int8": 8, "int4": 4}.get(method, 0)

    def linear(self, files: Files, part: Part) -> LinearWeight:
        if not self.bits:
            return self._float8(files, part)
        size = group_size(part.shape[1])
        start, stop = cover(part.columns, size)
        wide = part._replace(columns=(start, stop))
        weight = quantise(_floats(files, wide), self.bits, size)
        if not part.is_cut:
            return weight
        return cut_columns(weight, (part.columns[0] - start, part.columns[1] - start), part.name)

    def head(self, files: Files, part: Part) -> LinearWeight:
        return self.tied_head(_floats(files, part))

    def tied_head(self, table_VC: Tensor) -> LinearWeight:
        if not self.bits:
            return DenseWeight(values=table_VC)
        return quantise(table_VC, HEAD_BITS, group_size(table_VC.shape[1]))

    def _float8(self, files: Files, part: Part) -> DenseWeight:
        """An output's scale is that of all its inputs, so all are read, and then cut."""
        weight = quantise_e4m3(_floats(files, part._replace(columns=(0, part.shape[1]))))
        if not part.is_cut:
            return weight
        values = weight.values[:, slice(*part.columns)].contiguous()
        return DenseWeight(values=values, scale=weight.scale)


def _floats(files: Files, part: Part) -> Tensor:
    return cast(DenseWeight, AsIs().linear(files, part)).values


def _pass_zero_bias(files: Files, part: Part) -> None:
    """GPTQ's tools write biases of zeros for layers that have none."""
    name = f"{part.name}.bias"
    if files.is_zero(name):
        files.pass_by(name)
