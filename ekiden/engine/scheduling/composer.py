"""What goes into a step: decode rows, then chunks of prompts, then newcomers, then proposals."""

from __future__ import annotations

import msgspec

from ekiden.engine.scheduling.block_tables import BlockTables
from ekiden.engine.scheduling.policy import rows_per_step
from ekiden.engine.scheduling.queues import Queues
from ekiden.engine.scheduling.schedule import Limits, Schedule, ScheduledChunk
from ekiden.engine.scheduling.sequence import Sequence


class Composer:
    """Fills steps from the queues, and preempts where decode rows lack blocks."""

    def __init__(self, queues: Queues, tables: BlockTables, limits: Limits) -> None:
        self._queues = queues
        self._tables = tables
        self._limits = limits

    def fill(self, step: Schedule, *, whole: bool) -> None:
        """``whole``: the step has all decode rows that there will be, or stays empty."""
        if self._decode_rows(step, whole):
            self._prefill_chunks(step)
            self._admit(step)
            self._speculate(step)

    def _decode_rows(self, step: Schedule, whole: bool) -> bool:
        """Take the rows of one step; False, and nothing taken, if it had to be ``whole`` and
        cannot be."""
        running = self._queues.running
        decoding = sum(sequence.remaining <= 1 for sequence in running)
        rows = rows_per_step(decoding, self._limits.micro_batches)
        known = [sequence for sequence in running if sequence.remaining == 1]
        following = self._following(known[:rows], rows) if self._limits.plan_ahead else []
        if following is None and whole:
            return False
        for sequence in (*known, *(following or ())):
            if len(step.chunks) == rows or not step.budget:
                break
            # An older row may have preempted this one.
            if sequence.blocks and self._grow(sequence, step):
                step.take(sequence)
        return True

    def _following(self, known: list[Sequence], rows: int) -> list[Sequence] | None:
        """Rows beside ``known`` that go on from the tokens of one step in flight, the oldest.

        None: not all of them can, or blocks are short for them and ``known``.
        """
        awaiting = [s for s in self._queues.running if s.remaining == 0 and s.goes_on]
        oldest = min((sequence.awaited for sequence in awaiting), default=0)
        group = [s for s in awaiting if s.awaited == oldest][: rows - len(known)]
        blocks = sum(map(self._tables.must_grow, (*known, *group)))
        # Choices that part need blocks and copies, which are not known before their tokens.
        parts = any(len(sequence.choices) > 1 for sequence in group)
        return None if parts or blocks > self._tables.pool.available else group

    def _grow(self, sequence: Sequence, step: Schedule) -> bool:
        """Make sure the next position has a block; preempt younger ones for it."""
        while not self._tables.grow(sequence):
            if (victim := self._victim(sequence)) is None:
                return False
            self._preempt(victim)
            step.preempted.append(victim)
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The youngest that runs, is younger than ``sequence``, and can let go of its blocks."""
        for other in reversed(self._queues.running):
            if other is sequence:
                return None
            if not other.in_flight and not other.pinned:
                return other
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self._queues.discard(sequence)
        self._tables.strip(sequence)
        sequence.preemptions += 1
        sequence.scheduled = sequence.computed = sequence.published = 0
        sequence.parent = sequence.chain.root
        self._queues.wait(sequence)

    def _prefill_chunks(self, step: Schedule) -> None:
        for sequence in self._queues.running:
            if not step.budget:
                return
            if sequence.remaining > 1:
                step.take(sequence)

    def _admit(self, step: Schedule) -> None:
        waiting = self._queues.waiting
        while waiting and step.budget:
            sequence = waiting[0]
            if not self._queues.has_seats(sequence, self._limits.max_num_seqs):
                return
            if not self._tables.place(sequence):
                return
            waiting.pop(0)
            self._queues.run(sequence)
            step.take(sequence)

    def _speculate(self, step: Schedule) -> None:
        for index, chunk in enumerate(step.chunks):
            if step.budget and chunk.sequence.draft and chunk.is_last:
                draft = chunk.sequence.draft[: self._spare(chunk, step.budget)]
                step.budget -= len(draft)
                step.chunks[index] = msgspec.structs.replace(chunk, draft=draft)

    def _spare(self, chunk: ScheduledChunk, budget: int) -> int:
        """Positions after ``chunk`` that can be had for its draft."""
        wanted = min(len(chunk.sequence.draft), budget)
        return self._tables.stretch(chunk.sequence, chunk.stop, wanted)
