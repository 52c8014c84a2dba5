"""One replica: the engine's scheduler and block pool, over steps that take modelled time.

What the engine does between two steps is done here in the same order: hand-offs are announced, the
next step is scheduled, a collected step's chunks are taken in, room that came free is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from ekiden.cache.block_pool import BlockPool
from ekiden.core.types import ReplicaStats
from ekiden.engine.meters import Meters, replica_stats
from ekiden.engine.scheduling.schedule import Limits, Schedule, ScheduledChunk
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Gate, Sequence
from ekiden.sim.costs import Costs
from ekiden.sim.loop import Loop
from ekiden.sim.prompts import Prompt, Prompts
from ekiden.sim.stride import Stride, advance, stride
from ekiden.sim.wire import Wire

_TOKEN = 1
"""That every step samples: which one it is changes nothing that is simulated."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all replicas of a pool have in common."""

    role: str
    costs: Costs
    blocks: int
    limits: Limits
    gpus: int = 1
    strides: bool = True
    """False: every step by itself, the reference for the test."""


class Owner(Protocol):
    """Hears what becomes of its sequence."""

    def ready(self) -> None:
        """The hand-off's turn is near."""

    def started(self) -> None:
        """Its first chunk is in a step."""

    def computed(self, stop: int) -> None:
        """Positions before ``stop`` have their KV."""

    def sampled(self) -> None:
        """There is a first token."""

    def finished(self) -> None:
        """There is the last one; the sequence is gone."""

    def preempted(self) -> None:
        """Its blocks were taken."""


class Caller(Protocol):
    """Hears when a replica dies."""

    def lost(self) -> None: ...


class _Step(NamedTuple):
    schedule: Schedule
    begin: float


class Replica:
    """One life of a replica."""

    def __init__(
        self, name: str, epoch: int, setup: Setup, prompts: Prompts, loop: Loop, touched: Touched
    ) -> None:
        """``touched`` is called whenever figures may have changed."""
        self.name, self.epoch, self.setup = name, epoch, setup
        self.alive, self.draining = True, False
        self.pool = BlockPool(setup.blocks)
        self.scheduler = Scheduler(self.pool, setup.limits)
        self.meters = Meters()
        self.owners: dict[int, Owner] = {}
        self.callers: dict[Caller, None] = {}
        """Who has asked something of it and has not left."""
        self.wire = Wire()
        self.busy_s = 0.0
        self.computed_tokens = self.sampled_tokens = 0
        self._prompts, self._loop, self._touched = prompts, loop, touched
        self._in_flight: deque[_Step] = deque()
        self._stride: Stride | None = None
        self._begun: set[int] = set()
        """Sequences that have had their first token."""
        self._blocked = False
        """Who waits cannot be admitted before something ends."""
        self._waiters: list[Callable[[], None]] = []
        self._arrivals = 0
        self._free_at = self._ended_at = 0.0
        self._planned = False

    # What is asked of it

    def sequence(self, prompt: Prompt, output: int, gate: Gate = Gate.NONE) -> Sequence:
        """A sequence for ``output`` tokens after the prompt, not yet anywhere."""
        self._arrivals += 1
        return Sequence(
            request_id="",
            order=(0, self._arrivals, 0),
            tokens=prompt.tokens,
            choices=(0,),
            chain=self._prompts.chain(prompt),
            max_tokens=len(prompt.tokens) + output,
            gate=gate,
        )

    def cached(self, prompt: Prompt) -> int:
        """Tokens of the prompt in the cache; its last one is always computed."""
        keys = prompt.keys[: (len(prompt.tokens) - 1) // self.setup.limits.block_size]
        return len(self.pool.find(self._prompts.root, keys)) * self.setup.limits.block_size

    def add(self, sequence: Sequence, owner: Owner) -> None:
        self._settle()
        self.owners[sequence.number] = owner
        self.scheduler.add(sequence)
        self._changed()

    def reserve(self, sequence: Sequence, owner: Owner) -> bool:
        """Whether there is room for KV that comes from outside; it is held then."""
        self._settle()
        if not self.scheduler.reserve(sequence):
            return False
        self.owners[sequence.number] = owner
        self._changed()
        return True

    def open(self, sequence: Sequence, session: int) -> None:
        self._settle()
        self.scheduler.open(sequence, session)
        self._changed()

    def join(self, sequence: Sequence) -> None:
        """The KV of a reserved sequence is here, and so is its first token."""
        self._settle()
        self.scheduler.join(sequence)
        self._begun.add(sequence.number)
        sequence.tokens.append(_TOKEN)
        self._changed()

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state."""
        if self.owners.pop(sequence.number, None) is not None and self.alive:
            self._begun.discard(sequence.number)
            self._settle()
            self.scheduler.remove(sequence)
            self._changed()

    def wait_for_room(self, waiter: Callable[[], None]) -> None:
        """Call ``waiter`` once, when ``reserve`` may say yes to what it has just said no to."""
        self.scheduler.made_room()
        self._waiters.append(waiter)

    def stats(self) -> ReplicaStats:
        """As the engine tells them."""
        self._settle()
        return replica_stats(self.scheduler.queues, self.pool, self.meters)

    @property
    def idle(self) -> bool:
        return not (self._in_flight or self._stride or self.owners)

    def kill(self) -> None:
        """All that it held is lost, and its callers hear so."""
        self._settle()
        self.alive = False
        for caller in list(self.callers):
            caller.lost()

    # Steps

    def _changed(self) -> None:
        self._blocked = False
        self._soon()
        self._touched(self)

    def _soon(self) -> None:
        """Plan once all that happens at this moment has happened."""
        if not self._planned:
            self._planned = True
            self._loop.at(self._loop.now(), self._plan)

    def _plan(self) -> None:
        self._planned = False
        if not self.alive or self._stride is not None:
            return
        for sequence in self.scheduler.announce():
            self.owners[sequence.number].ready()
        while len(self._in_flight) < self.setup.limits.micro_batches:
            if self._strides() or not self._submit():
                break
        if self._waiters and self.scheduler.made_room():
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter()

    def _strides(self) -> bool:
        queues = self.scheduler.queues
        if not self.setup.strides or self._in_flight or queues.closed:
            return False
        if queues.waiting and not self._blocked:
            return False
        if any(row.number not in self._begun for row in queues.running):
            return False
        now = self._loop.now()
        self._stride = found = stride(self.scheduler, self.setup.costs, now)
        if found is not None:
            self._loop.at(found.ends[-1], lambda: self._end_stride(found))
        return found is not None

    def _submit(self) -> bool:
        schedule = self.scheduler.schedule(len(self._in_flight))
        for sequence in schedule.preempted:
            self.owners[sequence.number].preempted()
        if not schedule.chunks:
            return False
        waits = bool(self.scheduler.queues.waiting)
        decodes = all(chunk.stop - chunk.start == 1 for chunk in schedule.chunks)
        self._blocked = waits and decodes and schedule.budget > 0
        cost = self.setup.costs.step(schedule.chunks)
        begin = max(self._loop.now(), self._free_at)
        self._free_at = begin + cost.occupied
        self._fly(schedule, begin, begin + cost.latency)
        return True

    def _fly(self, schedule: Schedule, begin: float, end: float) -> None:
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            if chunk.start == sequence.cached:
                self.owners[sequence.number].started()
        self._in_flight.append(_Step(schedule, begin))
        self._loop.at(end, self._collect)

    def _collect(self) -> None:
        """The oldest step has ended."""
        if not self.alive:
            return
        step = self._in_flight.popleft()
        now = self._loop.now()
        seconds = now - max(step.begin, self._ended_at)
        self._ended_at = now
        self.busy_s += seconds
        sizes = [chunk.stop - chunk.start for chunk in step.schedule.chunks]
        rows = sum(size == 1 for size in sizes)
        self.meters.measured(rows, sum(sizes) - rows, seconds)
        for chunk in step.schedule.chunks:
            self._take(chunk)
        self._after()

    def _take(self, chunk: ScheduledChunk) -> None:
        sequence, last = chunk.sequence, chunk.is_last
        self.scheduler.collected(chunk)
        owner = self.owners.get(sequence.number)
        if owner is None:
            return
        self.computed_tokens += chunk.stop - chunk.start
        owner.computed(chunk.stop)
        if last:
            self._sample(sequence, owner)

    def _sample(self, sequence: Sequence, owner: Owner) -> None:
        if sequence.number not in self._begun:
            self._begun.add(sequence.number)
            owner.sampled()
        if sequence.pinned:
            self.scheduler.detach(sequence)
            return
        self.sampled_tokens += 1
        self.scheduler.extend(sequence, [_TOKEN])
        self._finish(sequence, owner)

    def _finish(self, sequence: Sequence, owner: Owner) -> None:
        if len(sequence.tokens) >= sequence.max_tokens:
            self._blocked = False
            del self.owners[sequence.number]
            self._begun.discard(sequence.number)
            self.scheduler.remove(sequence)
            owner.finished()

    def _after(self) -> None:
        self._soon()
        self._touched(self)

    # Strides

    def _end_stride(self, ended: Stride) -> None:
        if self._stride is not ended or not self.alive:
            return
        self._stride = None
        self._advance(ended, len(ended.ends))
        for row in ended.rows:
            self._finish(row, self.owners[row.number])
        self._after()

    def _advance(self, over: Stride, steps: int) -> None:
        for seconds in over.seconds(steps):
            self.meters.measured(len(over.rows), 0, seconds)
            self.busy_s += seconds
        if steps:
            self._ended_at = over.ends[steps - 1]
            self.computed_tokens += steps * len(over.rows)
            self.sampled_tokens += steps * len(over.rows)
            advance(self.scheduler, over.rows, steps, _TOKEN)

    def _settle(self) -> None:
        """Bring a stride to the present: what has ended is taken in, and the step that runs now
        goes on as one of its own."""
        over, self._stride = self._stride, None
        if over is None:
            return
        steps = min(over.over_at(self._loop.now()), len(over.ends) - 1)
        self._advance(over, steps)
        schedule = self.scheduler.schedule(0)
        begin = over.ends[steps - 1] if steps else over.begin
        self._free_at = over.ends[steps]
        self._fly(schedule, begin, over.ends[steps])


Touched = Callable[[Replica], None]
"""Hears that a replica's figures may have changed."""
