"""One step in the making, and what bounds it."""

from __future__ import annotations

import msgspec

from ekiden.engine.scheduling.sequence import Sequence


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one step and one replica can take."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    micro_batches: int = 1
    """Stages of the pipeline: so many steps are computed at once."""
    plan_ahead: bool = False
    """Whether rows may go on from tokens that are still being sampled."""


class ScheduledChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Positions [start, stop) of ``sequence`` are in the step; ``copy`` comes before them.

    The positions after them hold ``draft``, whose KV counts for nothing until it is accepted.
    """

    sequence: Sequence
    start: int
    stop: int
    copy: tuple[int, int] | None
    draft: tuple[int, ...] = ()
    after: int = 0
    """The step in flight that samples the one token of this chunk; 0: all tokens are known."""

    @property
    def is_last(self) -> bool:
        """Whether it ends at the last token that is known, or at the one being sampled, so that
        the next one can be sampled."""
        return self.stop >= len(self.sequence.tokens)


class Schedule(msgspec.Struct, kw_only=True):
    """One step in the making."""

    number: int
    budget: int
    chunks: list[ScheduledChunk] = []
    preempted: list[Sequence] = []

    def take(self, sequence: Sequence) -> None:
        """Put the next tokens of ``sequence`` into the step, as many as the budget allows; or the
        one that is being sampled, where all known ones are in steps."""
        after = 0 if sequence.remaining else sequence.awaited
        count = min(sequence.remaining or 1, self.budget)
        start = sequence.scheduled
        sequence.scheduled += count
        sequence.in_flight += 1
        if sequence.remaining <= 0:
            sequence.awaited = self.number
        chunk = ScheduledChunk(
            sequence=sequence, start=start, stop=start + count, copy=sequence.copy, after=after
        )
        # The step owns the copy's source from here on; ``collected`` lets go of it.
        sequence.copy = None
        self.budget -= count
        self.chunks.append(chunk)
