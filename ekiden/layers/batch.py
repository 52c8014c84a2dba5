"""One step's tokens as tensors: what every layer of every stage needs to know.

Shapes: S sequences, T tokens of all sequences end to end, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.cache.tensors import Slots
from ekiden.layers.grouping import AttentionGroup, group_sequences


class Span(NamedTuple):
    """One sequence's part of a step: ``tokens`` at positions [start, start + len(tokens))."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    """Block table that covers positions [0, start + len(tokens)); may be longer."""
    wants_logits: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """All tensors int64 on the model's device; lists are plain numbers on the host."""

    tokens_T: Tensor
    positions_T: Tensor
    slots: Slots
    logit_rows_R: Tensor
    """Rows of T: the last token of every span that wants logits, in order."""
    query_starts: list[int]
    """S + 1 offsets into T."""
    kv_lengths: list[int]
    """Cache length of each sequence after this step."""
    block_tables: list[list[int]]
    block_size: int
    _groups: dict[int, list[AttentionGroup]] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls, spans: Sequence[Span], block_size: int, device: torch.device | str = "cpu"
    ) -> ForwardBatch:
        """Lay out ``spans`` (or equal tuples) end to end.

        Raises:
            ValueError: a span is empty, or its block table is too short.
        """
        spans = [Span(*span) for span in spans]
        for span in spans:
            _check(span, block_size)
        starts = [0, *accumulate(len(span.tokens) for span in spans)]
        positions = [
            position for s in spans for position in range(s.start, s.start + len(s.tokens))
        ]
        blocks = [
            s.blocks[position // block_size]
            for s in spans
            for position in range(s.start, s.start + len(s.tokens))
        ]

        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        positions_T = tensor(positions)
        rows = [stop - 1 for s, stop in zip(spans, starts[1:], strict=True) if s.wants_logits]
        return cls(
            tokens_T=tensor([token for s in spans for token in s.tokens]),
            positions_T=positions_T,
            slots=Slots(tensor(blocks), positions_T % block_size),
            logit_rows_R=tensor(rows),
            query_starts=starts,
            kv_lengths=[s.start + len(s.tokens) for s in spans],
            block_tables=[list(s.blocks) for s in spans],
            block_size=block_size,
        )

    def groups(self, window: int) -> list[AttentionGroup]:
        """How attention walks this batch; the same for every layer with this window."""
        if window not in self._groups:
            self._groups[window] = group_sequences(
                self.query_starts,
                self.kv_lengths,
                self.block_tables,
                self.block_size,
                window,
                self.tokens_T.device,
            )
        return self._groups[window]


def _check(span: Span, block_size: int) -> None:
    end = span.start + len(span.tokens)
    if not span.tokens:
        raise ValueError("a span of a step has no tokens")
    if len(span.blocks) * block_size < end:
        raise ValueError(f"{len(span.blocks)} blocks of {block_size} do not cover {end} positions")
