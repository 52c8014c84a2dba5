"""Seconds of a step and bytes of KV, by the planner's latency model, quick enough for millions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ekiden.engine.scheduling.schedule import ScheduledChunk
from ekiden.planner.batch import Batch
from ekiden.planner.steps import Stepper

GRID = 64
"""Contexts, in tokens, at which a decode step is computed; between them it is taken as linear.
Exact for full attention; a window bends the line inside one cell."""


class Cost(NamedTuple):
    """Seconds of one step."""

    latency: float
    """Until its tokens are there."""
    occupied: float
    """Until the next step may enter: less than the latency where there are stages."""


class Costs:
    """Of one replica's steps."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        layout = stepper.replica.layout
        self._groups = layout.dp
        self._staged = layout.pp > 1
        self._cells: dict[tuple[int, int], tuple[Cost, Cost]] = {}
        self._tp = layout.tp

    def decode(self, rows: int, context: int) -> Cost:
        """``rows`` sequences that see ``context`` tokens in all."""
        mean = context / rows
        cell = int(mean) // GRID
        low, high = self._ends(rows, cell)
        share = mean / GRID - cell
        return Cost(*(one + (other - one) * share for one, other in zip(low, high, strict=True)))

    def latencies(self, rows: int, context: int, steps: int) -> Iterator[float]:
        """Of ``steps`` decode steps one after the other; each row sees a token more every time."""
        cell, low, high = -1, 0.0, 0.0
        for seen in range(context, context + steps * rows, rows):
            mean = seen / rows
            if (now := int(mean) // GRID) != cell:
                cell, ends = now, self._ends(rows, now)
                low, high = ends[0].latency, ends[1].latency
            yield low + (high - low) * (mean / GRID - cell)

    def _ends(self, rows: int, cell: int) -> tuple[Cost, Cost]:
        """At both ends of a cell of contexts."""
        if (found := self._cells.get((rows, cell))) is None:
            found = self._decode(rows, cell * GRID), self._decode(rows, (cell + 1) * GRID)
            self._cells[rows, cell] = found
        return found

    def step(self, chunks: list[ScheduledChunk]) -> Cost:
        """A step of decode rows and chunks of prompts."""
        sums = rows, context, tokens, _ = _sums(chunks)
        return self.of(self._batch(*sums)) if tokens else self.decode(rows, context)

    def batch(self, chunks: list[ScheduledChunk]) -> Batch:
        """What such a step is to the latency model."""
        return self._batch(*_sums(chunks))

    def of(self, batch: Batch) -> Cost:
        """Computed, not between grid points."""
        latency = self.stepper.mixed(batch).total
        return Cost(latency, self.stepper.slowest(batch) if self._staged else latency)

    def kv_bytes(self, tokens: int) -> int:
        """Of a sequence of so many tokens, on all ranks."""
        size = sum(work.kv.sequence_bytes(tokens) for work in self.stepper.works)
        return size * self._tp

    def _decode(self, rows: int, context: int) -> Cost:
        return self.of(Batch(decode=rows / self._groups, context=context))

    def _batch(self, rows: int, context: int, tokens: int, seen: int) -> Batch:
        return Batch(
            decode=rows / self._groups,
            context=context / rows if rows else 0.0,
            prefill=tokens / self._groups,
            seen=seen / tokens / 2 if tokens else 0.0,
        )


def _sums(chunks: list[ScheduledChunk]) -> tuple[int, int, int, int]:
    """Decode rows, tokens that they see, tokens of prompts, and twice the tokens that these see."""
    rows = context = tokens = seen = 0
    for chunk in chunks:
        length = chunk.stop - chunk.start
        if length == 1:
            rows += 1
            context += chunk.stop
        else:
            tokens += length
            seen += length * (chunk.start + chunk.stop)
    return rows, context, tokens, seen
