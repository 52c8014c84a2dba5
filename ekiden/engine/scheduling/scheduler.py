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

from ekiden.cache.block_pool import BlockPool
from ekiden.engine.scheduling.block_tables import BlockTables
from ekiden.engine.scheduling.composer import Composer
from ekiden.engine.scheduling.policy import enough_ahead
from ekiden.engine.scheduling.queues import Queues
from ekiden.engine.scheduling.schedule import Limits, Schedule, ScheduledChunk
from ekiden.engine.scheduling.sequence import Gate, Sequence


class Scheduler:
    """Queues, block tables and the order of work. Knows nothing of sampling. One thread."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.queues = Queues()
        self._tables = BlockTables(pool, self.queues, limits.block_size)
        self._composer = Composer(self.queues, self._tables, limits)
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
            promised = sum(map(self._tables.demand, (*queues.waiting, *queues.announced)))
            if enough_ahead(
                len(ahead), tokens, self.limits.max_num_batched_tokens
            ) or self.pool.available < promised + self._tables.demand(sequence):
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
        seats = self.limits.max_num_seqs - (first.seats if first else 0)
        if not self.queues.has_seats(sequence, seats):
            return False
        spare = self._tables.demand(first) + self._tables.allowance(first) if first else 0
        if not self._tables.place(sequence, spare):
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
        self._tables.publish(sequence)
        self.queues.run(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget ``sequence``; its blocks go as soon as no submitted step uses them."""
        self.queues.discard(sequence)
        sequence.dead = True
        if sequence.in_flight:
            self.queues.dying.append(sequence)
        else:
            self._tables.strip(sequence)

    def detach(self, sequence: Sequence) -> None:
        """Schedule ``sequence`` no more, but let it keep its blocks until ``remove``."""
        self.queues.discard(sequence)

    def schedule(self, in_flight: int = 0) -> Schedule:
        """The next step, to be submitted; without chunks if nothing can run now.

        ``in_flight`` steps were submitted and not collected.
        """
        step = Schedule(number=self._number + 1, budget=self.limits.max_num_batched_tokens)
        self._composer.fill(step, whole=in_flight >= self.limits.micro_batches)
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
            self._tables.publish(sequence)
        elif not sequence.in_flight:
            self.queues.dying.remove(sequence)
            self._tables.strip(sequence)

    def extend(self, sequence: Sequence, tokens: Items[int]) -> None:
        """Add what was sampled after a collected chunk.

        Where there is more than one token, all but the last were in that chunk's draft: their KV
        is there.
        """
        sequence.tokens += tokens
        if len(tokens) > 1:
            sequence.scheduled = sequence.computed = len(sequence.tokens) - 1
            self._tables.publish(sequence)

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
        whole = trunk.computed // self.limits.block_size
        branch = Sequence(
            request_id=trunk.request_id,
            order=(*trunk.order[:2], choice),
            tokens=[*trunk.tokens, token],
            choices=(choice,),
            chain=trunk.chain.branch(whole),
            max_tokens=trunk.max_tokens,
        )
        if self._tables.share(trunk, branch):
            self.queues.run(branch)
        else:
            branch.preemptions += 1
            self.queues.wait(branch)
        return branch
