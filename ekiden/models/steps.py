"""Decode steps, recorded once for each number of rows and replayed ever after.

A decode step of so many rows always runs the same kernels on the same memory, and only numbers in
that memory change. So its launches are recorded (a tape on CPU, a CUDA graph on a GPU) with inputs
of their own, into which every later step is copied. Prompts run as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.layers.batch import ForwardBatch
from ekiden.layers.ops import Ops
from ekiden.layers.rope import Rotation

Outputs = tuple[Tensor, ...]


class StepInputs(NamedTuple):
    """All that one stage's step reads, its weights and the cache apart."""

    batch: ForwardBatch
    rotations: tuple[Rotation, ...]
    entered_TC: Tensor | None
    """What the stage before sent."""


class Recorded(NamedTuple):
    """One recording: where its inputs go, and what runs it."""

    inputs: StepInputs
    replay: Callable[[], Outputs]
    cache: Tensor
    """Kept, for the recording holds its address."""


class Steps:
    """Runs ``body`` on a step: recorded where the kernels can, else directly."""

    def __init__(
        self, ops: Ops, body: Callable[[StepInputs, Tensor], Outputs], max_blocks: int
    ) -> None:
        """``body`` calls nothing but ``ops``; ``max_blocks`` is the longest block table."""
        self._ops = ops
        self._body = body
        self._max_blocks = max_blocks
        self._recorded: dict[tuple[int, int], Recorded] = {}

    def run(self, inputs: StepInputs, cache: Tensor) -> Outputs:
        """``body(inputs, cache)``. Outputs hold until the next call."""
        rows = len(inputs.batch.tokens_T)
        bucket = self._ops.bucket(rows) if inputs.batch.is_decode else 0
        if not bucket:
            return self._body(inputs, cache)
        recorded = self._recorded.get((bucket, cache.data_ptr()))
        if recorded is None:
            recorded = self._record(inputs, bucket, cache)
        else:
            _load(recorded.inputs, inputs)
        return tuple(output[:rows] for output in recorded.replay())

    def _record(self, inputs: StepInputs, bucket: int, cache: Tensor) -> Recorded:
        fixed = _fixed_inputs(inputs, bucket, self._max_blocks)
        _load(fixed, inputs)
        replay = self._ops.record(lambda: self._body(fixed, cache))
        recorded = Recorded(fixed, replay, cache)
        self._recorded[bucket, cache.data_ptr()] = recorded
        return recorded


def _fixed_inputs(like: StepInputs, rows: int, max_blocks: int) -> StepInputs:
    """Inputs of a decode step of ``rows``, every row of them padding."""
    device = like.batch.tokens_T.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    batch = ForwardBatch(
        tokens_T=zeros(rows),
        positions_T=zeros(rows),
        slots_T=zeros(rows) - 1,
        logit_rows_R=torch.arange(rows, device=device),
        query_starts_S1=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lengths_S=zeros(rows, dtype=torch.int32),
        block_tables_SM=zeros(rows, max_blocks, dtype=torch.int32),
        block_size=like.batch.block_size,
        query_starts=list(range(rows + 1)),
        kv_lengths=[0] * rows,
    )
    rotations = tuple(
        Rotation(*(angle.new_zeros(rows, angle.shape[1]) for angle in rotation))
        for rotation in like.rotations
    )
    entered = like.entered_TC
    return StepInputs(
        batch, rotations, None if entered is None else entered.new_zeros(rows, entered.shape[1])
    )


def _load(fixed: StepInputs, step: StepInputs) -> None:
    """Copy ``step`` into the first rows; the others stay or become padding."""
    target, source = fixed.batch, step.batch
    rows, width = source.block_tables_SM.shape
    target.tokens_T[:rows] = source.tokens_T
    target.positions_T[:rows] = source.positions_T
    target.slots_T[:rows] = source.slots_T
    target.slots_T[rows:] = -1
    target.kv_lengths_S[:rows] = source.kv_lengths_S
    target.kv_lengths_S[rows:] = 0
    target.block_tables_SM[:rows, :width] = source.block_tables_SM
    for kept, new in zip(fixed.rotations, step.rotations, strict=True):
        kept.cos_TR[:rows] = new.cos_TR
        kept.sin_TR[:rows] = new.sin_TR
    if fixed.entered_TC is not None and step.entered_TC is not None:
        fixed.entered_TC[:rows] = step.entered_TC
