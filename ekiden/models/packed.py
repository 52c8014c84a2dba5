"""Whole numbers packed in 32-bit words, as GPTQ, AWQ and compressed-tensors store them.

A rank reads the words of its own outputs and inputs, as many as make whole groups, and cuts.

Shapes: O outputs, I inputs, G groups of S inputs, n numbers in a word, W words.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.core.errors import SetupError
from ekiden.layers.quantised import cut_columns
from ekiden.layers.weights import DenseWeight, GroupedWeight, LinearWeight, Range
from ekiden.models.quantization_config import QuantizationConfig
from ekiden.models.stored import FLOATS, Files, Part, cover

logger = logging.getLogger(__name__)

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word outputs 0 to 7 stand: AutoAWQ deals them out for its kernel."""


class Numbers(NamedTuple):
    """A covering part of a matrix, outputs first."""

    values_OI: Tensor
    """uint8."""
    scales_OG: Tensor
    """float32."""
    zeros_OG: Tensor
    """uint8."""


class Covered(NamedTuple):
    """What is read for a part: whole words, and whole groups unless there is but one."""

    inputs: Range
    groups: Range
    all_groups: int


class PackedReader:
    """Implements ``stored.Reader``."""

    def __init__(self, config: QuantizationConfig) -> None:
        self.config = config
        self.per_word = 32 // config.bits
        self._told = False
        self.key, self.order, self.numbers = {
            "gptq": ("qweight", "g_idx", self._gptq),
            "awq": ("qweight", "g_idx", self._awq),
            "words": ("weight_packed", "weight_g_idx", self._words),
        }[config.packing]

    def holds(self, files: Files, name: str) -> bool:
        return files.has(f"{name}.{self.key}")

    def read(self, files: Files, part: Part) -> LinearWeight:
        size = self._group_size(part)
        groups_I = self._groups(files, part, size)
        if groups_I is not None:
            return self._sorted(files, part, groups_I, size)
        unit = self.per_word if size == part.shape[1] else size
        start, stop = cover(part.columns, unit)
        first, last = cover(part.columns, size)
        covered = Covered((start, stop), (first // size, last // size), part.shape[1] // size)
        weight = self._weight(self.numbers(files, part, covered), min(size, stop - start), None)
        if (start, stop) == part.columns:
            return weight
        return cut_columns(weight, (part.columns[0] - start, part.columns[1] - start), part.name)

    def _weight(self, numbers: Numbers, size: int, order_I: Tensor | None) -> GroupedWeight:
        return GroupedWeight(
            values=numbers.values_OI if order_I is None else numbers.values_OI[:, order_I],
            scales=numbers.scales_OG,
            zeros=numbers.zeros_OG,
            bits=self.config.bits,
            group_size=size,
            order=order_I,
        )

    def _group_size(self, part: Part) -> int:
        size = self.config.group_size or part.shape[1]
        if part.shape[1] % size or part.shape[1] % self.per_word:
            raise SetupError(
                f"{part.name} has {part.shape[1]} inputs, which groups of {size} and words of "
                f"{self.per_word} numbers do not divide: such a checkpoint is not supported"
            )
        return size

    def _groups(self, files: Files, part: Part, size: int) -> Tensor | None:
        """The group of each input, int64 [I]; None where they are in order."""
        name = f"{part.name}.{self.order}"
        if not files.has(name):
            return None
        groups_I = files.stored(name, (part.shape[1],), ("I32",)).long()
        if groups_I.is_meta:
            return groups_I if self.config.sorted_inputs else None
        in_order_I = torch.arange(part.shape[1], device=groups_I.device) // size
        return None if torch.equal(groups_I, in_order_I) else groups_I

    def _sorted(self, files: Files, part: Part, groups_I: Tensor, size: int) -> LinearWeight:
        """Inputs whose groups do not lie together (``desc_act``): all are read, then sorted."""
        count = part.shape[1] // size
        inputs = cover(part.columns, self.per_word) if part.is_cut else part.columns
        numbers = self.numbers(files, part, Covered(inputs, (0, count), count))
        if part.is_cut:
            return self._held_dense(files, part, numbers, groups_I, inputs[0])
        order_I = groups_I.argsort(stable=True)
        in_order_I = torch.arange(part.shape[1], device=groups_I.device) // size
        if not groups_I.is_meta and not torch.equal(groups_I[order_I], in_order_I):
            raise SetupError(
                f"{part.name}.{self.order} does not put {size} inputs into each of {count} groups"
            )
        return self._weight(numbers, size, order_I)

    def _held_dense(
        self, files: Files, part: Part, numbers: Numbers, groups_I: Tensor, first: int
    ) -> DenseWeight:
        """A rank's inputs belong to any of the groups, and to none of them evenly."""
        if not self._told:
            dtype = str(files.dtype).removeprefix("torch.")
            logger.warning(
                "%s and others: inputs sorted by group (desc_act) cannot be shared by TP ranks as "
                "they are, so such matrices are held in %s",
                part.name,
                dtype,
            )
            self._told = True
        mine_I = groups_I[slice(*part.columns)]
        values_OI = numbers.values_OI[:, part.columns[0] - first :][:, : len(mine_I)].float()
        matrix = (values_OI - numbers.zeros_OG[:, mine_I]) * numbers.scales_OG[:, mine_I]
        return DenseWeight(values=matrix.to(files.dtype))

    def _gptq(self, files: Files, part: Part, covered: Covered) -> Numbers:
        """``qweight [I / n, O]``, words along inputs; ``qzeros [G, O / n]``, along outputs."""
        outs, ins, n, name = *part.shape, self.per_word, part.name
        words_WO = files.stored(
            f"{name}.qweight",
            (ins // n, outs),
            ("I32",),
            rows=(covered.inputs[0] // n, covered.inputs[1] // n),
            columns=part.rows,
        )
        # The first version of the format stores zero points one too low, 0 as the largest.
        zeros_GO = self._along_outputs(files, f"{name}.qzeros", part, covered)
        zeros_GO = (zeros_GO + self.config.zero_offset) & (2**self.config.bits - 1)
        return Numbers(
            unpack(words_WO.T, self.config.bits),
            self._scales_GO(files, f"{name}.scales", part, covered).T.contiguous(),
            zeros_GO.T.contiguous(),
        )

    def _awq(self, files: Files, part: Part, covered: Covered) -> Numbers:
        """``qweight [I, O / n]`` and ``qzeros [G, O / n]``, words along outputs, dealt out."""
        name = part.name
        rows = Covered(covered.inputs, covered.inputs, part.shape[1])
        values_IO = self._along_outputs(files, f"{name}.qweight", part, rows)
        zeros_GO = self._along_outputs(files, f"{name}.qzeros", part, covered)
        return Numbers(
            values_IO.T.contiguous(),
            self._scales_GO(files, f"{name}.scales", part, covered).T.contiguous(),
            zeros_GO.T.contiguous(),
        )

    def _words(self, files: Files, part: Part, covered: Covered) -> Numbers:
        """``weight_packed [O, I / n]``; ``weight_zero_point [O / n, G]``, words along outputs."""
        outs, ins, n, name = *part.shape, self.per_word, part.name
        files.pass_by(f"{name}.weight_shape")
        words_OW = files.stored(
            f"{name}.weight_packed",
            (outs, ins // n),
            ("I32",),
            rows=part.rows,
            columns=(covered.inputs[0] // n, covered.inputs[1] // n),
        )
        scales_OG = files.stored(
            f"{name}.weight_scale",
            (outs, covered.all_groups),
            FLOATS,
            rows=part.rows,
            columns=covered.groups,
        ).float()
        # Numbers around 0 are stored around the middle of what their bits can say.
        zeros_OG = torch.full_like(scales_OG, 2 ** (self.config.bits - 1)).to(torch.uint8)
        if not self.config.symmetric:
            start, stop = cover(part.rows, n)
            words_WG = files.stored(
                f"{name}.weight_zero_point",
                (-(-outs // n), covered.all_groups),
                ("I32",),
                rows=(start // n, stop // n),
                columns=covered.groups,
            )
            zeros_GO = unpack(words_WG.T, self.config.bits)
            zeros_OG = zeros_GO[:, part.rows[0] - start : part.rows[1] - start].T.contiguous()
        return Numbers(unpack(words_OW, self.config.bits), scales_OG, zeros_OG)

    def _along_outputs(self, files: Files, name: str, part: Part, covered: Covered) -> Tensor:
        """Rows ``covered.groups`` of numbers packed along outputs: uint8 [rows, part's outputs]."""
        n, outs = self.per_word, part.shape[0]
        if outs % n:
            raise SetupError(f"{name}: {outs} outputs do not fill words of {n} numbers")
        start, stop = cover(part.rows, n)
        words = files.stored(
            name,
            (covered.all_groups, outs // n),
            ("I32",),
            rows=covered.groups,
            columns=(start // n, stop // n),
        )
        numbers = unpack(words, self.config.bits)
        if self.config.packing == "awq":
            numbers = numbers.view(len(numbers), -1, n)[:, :, list(_AWQ_PLACES)].flatten(1)
        return numbers[:, part.rows[0] - start : part.rows[1] - start]

    def _scales_GO(self, files: Files, name: str, part: Part, covered: Covered) -> Tensor:
        shape = (covered.all_groups, part.shape[0])
        return files.stored(name, shape, FLOATS, rows=covered.groups, columns=part.rows).float()


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [R, W] to uint8 [R, W * 32 / bits]; the lowest bits of a word come first."""
    numbers = words.contiguous().flatten().view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)
