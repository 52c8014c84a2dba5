"""The steps of one replica: scheduled by the engine's scheduler, lasting as long as is modelled.

A step is submitted, is in flight for its time, and is collected: its chunks are taken in, as the
engine does it. Where nothing else can happen many of them are one ``Stride``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ekiden.engine.meters import Meters
from ekiden.engine.scheduling.schedule import Limits, Schedule, ScheduledChunk
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Sequence
from ekiden.sim.costs import Cost, Costs
from ekiden.sim.experts import Experts
from ekiden.sim.loop import Loop
from ekiden.sim.owner import Owner
from ekiden.sim.stride import Stride, advance, stride

TOKEN = 1
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
    experts: Experts | None = None
    """None: their ranks share the tokens as the latency model says."""


class _Step(NamedTuple):
    schedule: Schedule
    begin: float


class Steps:
    """What is in flight, what has been computed, and whose it was."""

    def __init__(
        self, setup: Setup, scheduler: Scheduler, loop: Loop, ended: Callable[[], None]
    ) -> None:
        """``ended`` is called after each step, or stride, that has been taken in."""
        self.owners: dict[int, Owner] = {}
        """Of the sequences, by number."""
        self.begun: set[int] = set()
        """Sequences that have had their first token."""
        self.blocked = False
        """Who waits cannot be admitted before something ends."""
        self.stopped = False
        """What is in flight never ends."""
        self.meters = Meters()
        self.busy_s = 0.0
        self.computed_tokens = self.sampled_tokens = 0
        self._setup, self._scheduler, self._loop, self._ended = setup, scheduler, loop, ended
        self._in_flight: deque[_Step] = deque()
        self._stride: Stride | None = None
        self._free_at = self._ended_at = 0.0

    @property
    def striding(self) -> bool:
        return self._stride is not None

    @property
    def idle(self) -> bool:
        return not (self._in_flight or self._stride or self.owners)

    def submit(self) -> None:
        """As many as may be in flight and can be scheduled now."""
        while len(self._in_flight) < self._setup.limits.micro_batches:
            if self._begin_stride() or not self._submit():
                break

    def settle(self) -> None:
        """Bring a stride to the present: what has ended is taken in, and the step that runs now
        goes on as one of its own."""
        over, self._stride = self._stride, None
        if over is None:
            return
        steps = min(over.over_at(self._loop.now()), len(over.ends) - 1)
        self._advance(over, steps)
        schedule = self._scheduler.schedule(0)
        begin = over.ends[steps - 1] if steps else over.begin
        self._free_at = over.ends[steps]
        self._fly(schedule, begin, over.ends[steps])

    # One by one

    def _submit(self) -> bool:
        schedule = self._scheduler.schedule(len(self._in_flight))
        for sequence in schedule.preempted:
            self.owners[sequence.number].preempted()
        if not schedule.chunks:
            return False
        waits = bool(self._scheduler.queues.waiting)
        decodes = all(chunk.stop - chunk.start == 1 for chunk in schedule.chunks)
        self.blocked = waits and decodes and schedule.budget > 0
        cost = self._cost(schedule.chunks)
        begin = max(self._loop.now(), self._free_at)
        self._free_at = begin + cost.occupied
        self._fly(schedule, begin, begin + cost.latency)
        return True

    def _cost(self, chunks: list[ScheduledChunk]) -> Cost:
        costs, experts = self._setup.costs, self._setup.experts
        if experts is None:
            return costs.step(chunks)
        numbers = (self.owners[chunk.sequence.number].asked.number for chunk in chunks)
        return experts.step(costs, chunks, numbers)

    def _fly(self, schedule: Schedule, begin: float, end: float) -> None:
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            if chunk.start == sequence.cached:
                self.owners[sequence.number].started()
        self._in_flight.append(_Step(schedule, begin))
        self._loop.at(end, self._collect)

    def _collect(self) -> None:
        """The oldest step has ended."""
        if self.stopped:
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
        self._ended()

    def _take(self, chunk: ScheduledChunk) -> None:
        sequence, last = chunk.sequence, chunk.is_last
        self._scheduler.collected(chunk)
        owner = self.owners.get(sequence.number)
        if owner is None:
            return
        self.computed_tokens += chunk.stop - chunk.start
        owner.computed(chunk.stop)
        if last:
            self._sample(sequence, owner)

    def _sample(self, sequence: Sequence, owner: Owner) -> None:
        if sequence.number not in self.begun:
            self.begun.add(sequence.number)
            owner.sampled()
        if sequence.pinned:
            self._scheduler.detach(sequence)
            return
        self.sampled_tokens += 1
        self._scheduler.extend(sequence, [TOKEN])
        self._finish(sequence, owner)

    def _finish(self, sequence: Sequence, owner: Owner) -> None:
        if len(sequence.tokens) >= sequence.max_tokens:
            self.blocked = False
            del self.owners[sequence.number]
            self.begun.discard(sequence.number)
            self._scheduler.remove(sequence)
            owner.finished()

    # Many at once

    def _begin_stride(self) -> bool:
        queues = self._scheduler.queues
        if not self._setup.strides or self._in_flight or queues.closed:
            return False
        if queues.waiting and not self.blocked:
            return False
        if any(row.number not in self.begun for row in queues.running):
            return False
        now = self._loop.now()
        self._stride = found = stride(self._scheduler, self._setup.costs, now)
        if found is not None:
            self._loop.at(found.ends[-1], lambda: self._end_stride(found))
        return found is not None

    def _end_stride(self, over: Stride) -> None:
        if self._stride is not over or self.stopped:
            return
        self._stride = None
        self._advance(over, len(over.ends))
        for row in over.rows:
            self._finish(row, self.owners[row.number])
        self._ended()

    def _advance(self, over: Stride, steps: int) -> None:
        for seconds in over.seconds(steps):
            self.meters.measured(len(over.rows), 0, seconds)
            self.busy_s += seconds
        if steps:
            self._ended_at = over.ends[steps - 1]
            self.computed_tokens += steps * len(over.rows)
            self.sampled_tokens += steps * len(over.rows)
            advance(self._scheduler, over.rows, steps, TOKEN)
