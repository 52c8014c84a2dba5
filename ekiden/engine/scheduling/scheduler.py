"""Continuous batching over a block pool: which tokens of which sequences go into the next step.

1. Decode rows come first, the oldest first, so that a prompt never stalls the running batch.
2. Prompts that run go on, a chunk each, with what is left of the step's token budget.
3. Waiting sequences are admitted in order while there are tokens, seats and blocks. Nobody
   overtakes the first one that does not fit. Blocks for all its known tokens are taken at
   once, so that only growth by decoding can run out of them.
4. Proposals of what follows a decode row get the tokens and blocks that are left over. They
   never push anything out, so speculation cannot make a pool too small.

A step may be planned while the steps of all stages are in flight. Its decode rows go on from
tokens that are being sampled, so the rank lacks nothing but these when its turn comes. Such a step
has all rows that will be there or is not made: else some would wait two steps for one token. It
pushes nothing out: where blocks are short, the steps in flight end first.

When a running sequence cannot grow, the youngest is preempted: its blocks go, its tokens stay,
and it is computed again later. The oldest is never preempted, so something always ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec

from ekiden.cache.block_pool import BlockPool
from ekiden.core.errors import InvariantBroken
from ekiden.engine.scheduling.policy import (
    blocks_for,
    enough_ahead,
    growth_allowance,
    rows_per_step,
)
from ekiden.engine.scheduling.queues import Queues
from ekiden.engine.scheduling.sequence import Gate, Sequence


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


class Scheduler:
    """Queues, block tables and the order of work. Knows nothing of sampling. One thread."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.queues = Queues()
        self._number = 0
        self._room = self._room_now()

    def add(self, sequence: Sequence) -> None:
        """Let a sequence without blocks wait for its turn."""
        self.queues.wait(sequence)

    def announce(self) -> list[Sequence]:
        """Hand-offs whose turn is near and for which there will be room: tell them now."""
        queues, told = self.queues, []
        while queues.closed:
            sequence = queues.closed[0]
            ahead = [other for other in queues.waiting if other.pinned] + queues.announced
            tokens = sum(len(other.tokens) for other in ahead)
            promised = sum(map(self._demand, (*queues.waiting, *queues.announced)))
            if enough_ahead(
                len(ahead), tokens, self.limits.max_num_batched_tokens
            ) or self.pool.available < promised + self._demand(sequence):
                break
            sequence.gate = Gate.ANNOUNCED
            queues.announced.append(queues.closed.pop(0))
            told.append(sequence)
        return told

    def open(self, sequence: Sequence, session: int) -> None:
        """The hand-off's session is open: it may run, and its blocks will be sent."""
        self.queues.discard(sequence)
        sequence.gate = Gate.OPEN
        sequence.session = session
        self.queues.wait(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Give ``sequence`` its blocks and its seats now, for KV that comes from outside.

        False, and nothing changed, where that would take a seat or a block from running work or
        from the first one that waits.
        """
        first = self.queues.waiting[0] if self.queues.waiting else None
        if not self._has_seats(sequence, spare=first.seats if first else 0):
            return False
        spare = self._demand(first) + self._allowance(first) if first else 0
        if not self._place(sequence, spare):
            return False
        self.queues.reserved.append(sequence)
        return True

    def made_room(self) -> bool:
        """Whether ``reserve`` may say yes now to what it said no to before the last call."""
        before, self._room = self._room, self._room_now()
        return any(now > then for now, then in zip(self._room, before, strict=True))

    def _room_now(self) -> tuple[int, int, int]:
        """Blocks, seats, and how few wait before a newcomer."""
        queues = self.queues
        return self.pool.available, -queues.seats(), -len(queues.waiting)

    def join(self, sequence: Sequence) -> None:
        """The KV of all known tokens of a reserved sequence is in its blocks: let it run."""
        self.queues.discard(sequence)
        sequence.scheduled = sequence.computed = len(sequence.tokens)
        self._publish(sequence)
        self.queues.run(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget ``sequence``; its blocks go as soon as no submitted step uses them."""
        self.queues.discard(sequence)
        sequence.dead = True
        if sequence.in_flight:
            self.queues.dying.append(sequence)
        else:
            self._strip(sequence)

    def detach(self, sequence: Sequence) -> None:
        """Schedule ``sequence`` no more, but let it keep its blocks until ``remove``."""
        self.queues.discard(sequence)

    def schedule(self, in_flight: int = 0) -> Schedule:
        """The next step, to be submitted; without chunks if nothing can run now.

        ``in_flight`` steps were submitted and not collected.
        """
        step = Schedule(number=self._number + 1, budget=self.limits.max_num_batched_tokens)
        if self._decode_rows(step, whole=in_flight >= self.limits.micro_batches):
            self._prefill_chunks(step)
            self._admit(step)
            self._speculate(step)
        self._number += bool(step.chunks)
        return step

    def collected(self, chunk: ScheduledChunk) -> None:
        """The step of ``chunk`` has ended: its KV is in the blocks."""
        sequence = chunk.sequence
        sequence.in_flight -= 1
        if chunk.copy is not None:
            self.pool.release(chunk.copy[:1])
        if not sequence.dead:
            sequence.computed = chunk.stop
            self._publish(sequence)
        elif not sequence.in_flight:
            self.queues.dying.remove(sequence)
            self._strip(sequence)

    def extend(self, sequence: Sequence, tokens: Items[int]) -> None:
        """Add what was sampled after a collected chunk.

        Where there is more than one token, all but the last were in that chunk's draft: their KV
        is there.
        """
        sequence.tokens += tokens
        if len(tokens) > 1:
            sequence.scheduled = sequence.computed = len(sequence.tokens) - 1
            self._publish(sequence)

    def fork(self, trunk: Sequence, choices: Items[tuple[int, int]]) -> list[Sequence]:
        """Part the running ``trunk`` into one sequence a (choice, first token).

        The first choice keeps the trunk. The others share its whole blocks and get a copy of the
        last, partial one; where there is no block for it they are computed again later.
        """
        branches = [self._branch(trunk, choice, token) for choice, token in choices[1:]]
        choice, token = choices[0]
        trunk.choices = (choice,)
        trunk.order = (*trunk.order[:2], choice)
        trunk.tokens.append(token)
        return [trunk, *branches]

    def _branch(self, trunk: Sequence, choice: int, token: int) -> Sequence:
        size = self.limits.block_size
        whole = trunk.computed // size
        branch = Sequence(
            request_id=trunk.request_id,
            order=(*trunk.order[:2], choice),
            tokens=[*trunk.tokens, token],
            choices=(choice,),
            chain=trunk.chain.branch(whole),
            max_tokens=trunk.max_tokens,
        )
        partial = trunk.blocks[whole:]
        target = self.pool.allocate(len(partial))
        if target is None:
            branch.preemptions += 1
            self.queues.wait(branch)
            return branch
        # Both ends stay owned until the step that copies was collected, whatever happens to
        # the trunk in between.
        self.pool.retain(trunk.blocks)
        branch.blocks = trunk.blocks[:whole] + target
        branch.copy = (partial[0], target[0]) if partial else None
        branch.scheduled = branch.computed = trunk.computed
        branch.published, branch.parent = trunk.published, trunk.parent
        self.queues.run(branch)
        return branch

    def _decode_rows(self, step: Schedule, whole: bool) -> bool:
        """Take the rows of one step; False, and nothing taken, if it had to be ``whole`` and
        cannot be."""
        running = self.queues.running
        decoding = sum(sequence.remaining <= 1 for sequence in running)
        rows = rows_per_step(decoding, self.limits.micro_batches)
        known = [sequence for sequence in running if sequence.remaining == 1]
        following = self._following(known[:rows], rows) if self.limits.plan_ahead else []
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
        awaiting = [s for s in self.queues.running if s.remaining == 0 and s.goes_on]
        oldest = min((sequence.awaited for sequence in awaiting), default=0)
        group = [s for s in awaiting if s.awaited == oldest][: rows - len(known)]
        size = self.limits.block_size
        blocks = sum(s.scheduled >= len(s.blocks) * size for s in (*known, *group))
        # Choices that part need blocks and copies, which are not known before their tokens.
        parts = any(len(sequence.choices) > 1 for sequence in group)
        return None if parts or blocks > self.pool.available else group

    def _grow(self, sequence: Sequence, step: Schedule) -> bool:
        """Make sure the next position has a block; preempt younger ones for it."""
        while sequence.scheduled >= len(sequence.blocks) * self.limits.block_size:
            if (blocks := self.pool.allocate(1)) is not None:
                sequence.blocks += blocks
            elif (victim := self._victim(sequence)) is not None:
                self._preempt(victim)
                step.preempted.append(victim)
            else:
                return False
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The youngest that runs, is younger than ``sequence``, and can let go of its blocks."""
        for other in reversed(self.queues.running):
            if other is sequence:
                return None
            if not other.in_flight and not other.pinned:
                return other
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self.queues.discard(sequence)
        self._strip(sequence)
        sequence.preemptions += 1
        sequence.scheduled = sequence.computed = sequence.published = 0
        sequence.parent = sequence.chain.root
        self.queues.wait(sequence)

    def _prefill_chunks(self, step: Schedule) -> None:
        for sequence in self.queues.running:
            if not step.budget:
                return
            if sequence.remaining > 1:
                step.take(sequence)

    def _admit(self, step: Schedule) -> None:
        waiting = self.queues.waiting
        while waiting and step.budget:
            sequence = waiting[0]
            if not self._has_seats(sequence) or not self._place(sequence):
                return
            waiting.pop(0)
            self.queues.run(sequence)
            step.take(sequence)

    def _speculate(self, step: Schedule) -> None:
        for index, chunk in enumerate(step.chunks):
            if step.budget and chunk.sequence.draft and chunk.is_last:
                draft = chunk.sequence.draft[: self._spare(chunk, step.budget)]
                step.budget -= len(draft)
                step.chunks[index] = msgspec.structs.replace(chunk, draft=draft)

    def _spare(self, chunk: ScheduledChunk, budget: int) -> int:
        """Positions after ``chunk`` that can be had: in its last block, and in one more."""
        sequence, size = chunk.sequence, self.limits.block_size
        wanted = min(len(sequence.draft), budget)
        if chunk.stop + wanted > len(sequence.blocks) * size:
            sequence.blocks += self.pool.allocate(1) or []
        return min(wanted, len(sequence.blocks) * size - chunk.stop)

    def _has_seats(self, sequence: Sequence, spare: int = 0) -> bool:
        taken = self.queues.seats() + spare
        return taken + sequence.seats <= self.limits.max_num_seqs

    def _place(self, sequence: Sequence, spare: int = 0) -> bool:
        """Take blocks for all known tokens, cached ones first, leaving ``spare`` others.

        The last token is always computed, since its logits are needed.
        """
        size, tokens = self.limits.block_size, sequence.tokens
        keys = sequence.chain.upto(tokens, len(tokens) - 1)
        hits = self.pool.find(sequence.chain.root, keys)
        fresh = blocks_for(len(tokens), size) - len(hits)
        needed = self.pool.count_cached(hits) + fresh + self._allowance(sequence)
        if self.pool.available < needed + spare:
            return False
        self.pool.retain(hits)
        sequence.blocks = hits + self._allocated(fresh)
        sequence.scheduled = sequence.computed = sequence.cached = len(hits) * size
        sequence.published = len(hits)
        sequence.parent = self.pool.serial(hits[-1]) if hits else sequence.chain.root
        return True

    def _allocated(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise InvariantBroken(f"{count} blocks were counted as available but are not")
        return blocks

    def _allowance(self, sequence: Sequence) -> int:
        """Blocks to leave for growth when ``sequence`` is admitted beside what runs."""
        own = max(0, sequence.growth_left() - self._demand(sequence))
        others = (*self.queues.running, *self.queues.reserved)
        growth = [own, *(other.growth_left() for other in others)]
        return sum(growth_allowance(sequence.preemptions, left) for left in growth)

    def _demand(self, sequence: Sequence) -> int:
        """Blocks for the known tokens of a waiting sequence, as if nothing were cached."""
        return blocks_for(len(sequence.tokens), self.limits.block_size)

    def _publish(self, sequence: Sequence) -> None:
        """Let later requests find the whole blocks that are computed."""
        whole = sequence.computed // self.limits.block_size
        if sequence.published == whole or sequence.parent is None:
            return
        keys = sequence.chain.upto(sequence.tokens, whole * self.limits.block_size)
        while sequence.published < whole and sequence.parent is not None:
            index = sequence.published
            sequence.parent = self.pool.publish(
                sequence.blocks[index], keys[index], sequence.parent
            )
            sequence.published += 1

    def _strip(self, sequence: Sequence) -> None:
        """Let go of everything that ``sequence`` owns."""
        if sequence.copy is not None:
            self.pool.release(sequence.copy[:1])
            sequence.copy = None
        self.pool.release(sequence.blocks)
        sequence.blocks = []
