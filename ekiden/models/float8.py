"""Matrices of bytes: 8-bit floats (e4m3) as ``fp8`` and compressed-tensors store them, and int8.

Shapes: O outputs, I inputs; a block of scales covers A outputs and B inputs.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ekiden.core.errors import SetupError
from ekiden.layers.weights import DenseWeight, GroupedWeight, LinearWeight
from ekiden.models.quantization_config import QuantizationConfig
from ekiden.models.stored import FLOATS, Files, Part

logger = logging.getLogger(__name__)

_KINDS = {"fp8": "F8_E4M3", "bytes": "I8"}
_UNUSED = ("input_scale", "weight_zero_point")
"""Of quantised activations, which are not; and zeros, for int8 weights are symmetric."""


class BytesReader:
    """Implements ``stored.Reader``; a scale for the tensor, for each output, or for blocks."""

    def __init__(self, config: QuantizationConfig) -> None:
        self.config = config
        self._told = False

    def holds(self, files: Files, name: str) -> bool:
        return files.has(f"{name}.{self.config.scale_name}")

    def read(self, files: Files, part: Part) -> LinearWeight:
        kind = _KINDS[self.config.packing]
        values = files.stored(
            f"{part.name}.weight", part.shape, (kind,), rows=part.rows, columns=part.columns
        )
        for name in _UNUSED:
            files.pass_by(f"{part.name}.{name}")
        if self.config.block is not None:
            return self._blocks(files, part, values, self.config.block)
        scale_O = self._scale(files, part)
        if kind == "F8_E4M3":
            return DenseWeight(values=values, scale=scale_O)
        return GroupedWeight(
            values=(values.to(torch.int16) + 128).to(torch.uint8),
            scales=scale_O[:, None],
            zeros=torch.full_like(scale_O[:, None], 128).to(torch.uint8),
            bits=8,
            group_size=part.columns[1] - part.columns[0],
        )

    def _scale(self, files: Files, part: Part) -> Tensor:
        """float32 [O] of the part's outputs."""
        name, outs = f"{part.name}.{self.config.scale_name}", part.shape[0]
        shape = files.shape(name)
        if shape in ((), (1,), (1, 1)):
            return files.stored(name, shape, FLOATS).float().reshape(1).repeat(_length(part.rows))
        if shape not in ((outs,), (outs, 1)):
            raise SetupError(
                f"{name} has shape {list(shape)}: it may be one number, or one for each of "
                f"{outs} outputs"
            )
        return files.stored(name, shape, FLOATS, rows=part.rows).float().reshape(-1)

    def _blocks(
        self, files: Files, part: Part, values: Tensor, block: tuple[int, int]
    ) -> DenseWeight:
        """Scales change along the inputs, which no product here knows: held in floats."""
        if not self._told:
            dtype = str(files.dtype).removeprefix("torch.")
            logger.warning("FP8 weights with a scale a block are held in %s", dtype)
            self._told = True
        name = f"{part.name}.{self.config.scale_name}"
        (a, b), (outs, ins) = block, part.shape
        scales = files.stored(name, (-(-outs // a), -(-ins // b)), FLOATS).float()
        rows = torch.arange(*part.rows, device=scales.device) // a
        columns = torch.arange(*part.columns, device=scales.device) // b
        return DenseWeight(values=(values.float() * scales[rows][:, columns]).to(files.dtype))


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
