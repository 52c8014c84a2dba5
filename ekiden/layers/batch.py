"""One step's tokens as tensors: what every layer of every stage needs to know.

Shapes: S sequences, T tokens of all sequences end to end, R rows whose logits are wanted, M blocks
of the longest block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.layers.grouping import AttentionGroup, group_sequences
from ekiden.layers.staging import to_device

Numbers = NDArray[np.int64]


class Span(NamedTuple):
    """One sequence's part of a step: ``tokens`` at positions [start, start + len(tokens))."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    """Block table that covers positions [0, start + len(tokens)); may be longer."""
    logit_rows: int
    """How many of the last tokens want logits: 0, 1, or more where guesses are checked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """All tensors are on the model's device."""

    tokens_T: Tensor
    """int64, as ``positions_T``, ``slots_T`` and ``logit_rows_R``."""
    positions_T: Tensor
    slots_T: Tensor
    """Where each token's KV goes: block * block_size + offset; negative: nowhere."""
    logit_rows_R: Tensor
    """Rows of T: the tokens of every span that want logits, in order."""
    query_starts_S1: Tensor
    """int32 [S + 1] offsets into T."""
    kv_lengths_S: Tensor
    """int32; cache length of each sequence after this step."""
    block_tables_SM: Tensor
    """int32; rows are filled up with any block."""
    block_size: int
    query_starts: list[int]
    """``query_starts_S1`` on the host."""
    kv_lengths: list[int]
    """``kv_lengths_S`` on the host."""
    _groups: dict[int, list[AttentionGroup]] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls, spans: Sequence[Span], block_size: int, device: torch.device | str = "cpu"
    ) -> ForwardBatch:
        """Lay out ``spans`` (or equal tuples) end to end.

        Raises:
            ValueError: a span is empty, its block table is too short, or it wants logits of more
                tokens than it has.
        """
        spans = [Span(*span) for span in spans]
        for span in spans:
            _check(span, block_size)
        counts = np.array([len(span.tokens) for span in spans], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)))
        ends = np.array([span.start for span in spans], dtype=np.int64) + counts
        owners = np.repeat(np.arange(len(spans)), counts)
        positions = np.arange(starts[-1]) - starts[owners] + (ends - counts)[owners]
        tables = _tables(spans, int(max(-(-ends // block_size), default=0)))
        blocks = tables[owners, positions // block_size].astype(np.int64)
        slots = blocks * block_size + positions % block_size

        arrays = (
            _tokens(spans, int(starts[-1])),
            positions,
            slots,
            _logit_rows(spans, starts),
            starts.astype(np.int32),
            ends.astype(np.int32),
            tables,
        )
        tokens_T, positions_T, slots_T, rows_R, starts_S1, lengths_S, tables_SM = to_device(
            arrays, torch.device(device)
        )
        return cls(
            tokens_T=tokens_T,
            positions_T=positions_T,
            slots_T=slots_T,
            logit_rows_R=rows_R,
            query_starts_S1=starts_S1,
            kv_lengths_S=lengths_S,
            block_tables_SM=tables_SM,
            block_size=block_size,
            query_starts=starts.tolist(),
            kv_lengths=ends.tolist(),
        )

    @property
    def is_decode(self) -> bool:
        """One token of every sequence, and logits of all: a step that can be recorded."""
        return len(self.tokens_T) == len(self.kv_lengths) == len(self.logit_rows_R)

    def groups(self, window: int) -> list[AttentionGroup]:
        """How attention walks this batch; the same for every layer with this window."""
        if window not in self._groups:
            self._groups[window] = group_sequences(
                self.query_starts,
                self.kv_lengths,
                self.block_tables_SM.to(torch.int64),
                self.block_size,
                window,
            )
        return self._groups[window]


def _check(span: Span, block_size: int) -> None:
    end = span.start + len(span.tokens)
    if not span.tokens:
        raise ValueError("a span of a step has no tokens")
    if len(span.blocks) * block_size < end:
        raise ValueError(f"{len(span.blocks)} blocks of {block_size} do not cover {end} positions")
    if not 0 <= span.logit_rows <= len(span.tokens):
        raise ValueError(f"a span of {len(span.tokens)} tokens wants {span.logit_rows} logit rows")


def _tokens(spans: Sequence[Span], total: int) -> Numbers:
    return np.fromiter((token for s in spans for token in s.tokens), dtype=np.int64, count=total)


def _tables(spans: Sequence[Span], width: int) -> NDArray[np.int32]:
    tables = np.zeros((len(spans), width), dtype=np.int32)
    for row, span in zip(tables, spans, strict=True):
        known = min(width, len(span.blocks))
        row[:known] = span.blocks[:known]
    return tables


def _logit_rows(spans: Sequence[Span], starts: Numbers) -> Numbers:
    rows = [
        np.arange(stop - span.logit_rows, stop)
        for span, stop in zip(spans, starts[1:], strict=True)
        if span.logit_rows
    ]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
