"""One replica: the engine's scheduler and block pool, over steps that take modelled time.

What the engine does between two steps is done here in the same order: hand-offs are announced, the
next step is scheduled, room that came free is told.
"""

from __future__ import annotations

from collections.abc import Callable

from ekiden.cache.block_pool import BlockPool
from ekiden.core.types import ReplicaStats
from ekiden.engine.meters import replica_stats
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Gate, Sequence
from ekiden.sim.loop import Loop
from ekiden.sim.owner import Caller, Owner
from ekiden.sim.prompts import Prompt, Prompts
from ekiden.sim.steps import TOKEN, Setup, Steps
from ekiden.sim.wire import Wire


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
        self.steps = Steps(setup, self.scheduler, loop, self._told)
        self.callers: dict[Caller, None] = {}
        """Who has asked something of it and has not left."""
        self.wire = Wire()
        self._prompts, self._loop, self._touched = prompts, loop, touched
        self._waiters: list[Callable[[], None]] = []
        self._arrivals = 0
        self._planned = False

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
        self.steps.settle()
        self.steps.owners[sequence.number] = owner
        self.scheduler.add(sequence)
        self._changed()

    def reserve(self, sequence: Sequence, owner: Owner) -> bool:
        """Whether there is room for KV that comes from outside; it is held then."""
        self.steps.settle()
        if not self.scheduler.reserve(sequence):
            return False
        self.steps.owners[sequence.number] = owner
        self._changed()
        return True

    def open(self, sequence: Sequence, session: int) -> None:
        self.steps.settle()
        self.scheduler.open(sequence, session)
        self._changed()

    def join(self, sequence: Sequence) -> None:
        """The KV of a reserved sequence is here, and so is its first token."""
        self.steps.settle()
        self.scheduler.join(sequence)
        self.steps.begun.add(sequence.number)
        sequence.tokens.append(TOKEN)
        self._changed()

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state."""
        if self.steps.owners.pop(sequence.number, None) is not None and self.alive:
            self.steps.begun.discard(sequence.number)
            self.steps.settle()
            self.scheduler.remove(sequence)
            self._changed()

    def wait_for_room(self, waiter: Callable[[], None]) -> None:
        """Call ``waiter`` once, when ``reserve`` may say yes to what it has just said no to."""
        self.scheduler.made_room()
        self._waiters.append(waiter)

    def stats(self) -> ReplicaStats:
        """As the engine tells them."""
        self.steps.settle()
        return replica_stats(self.scheduler.queues, self.pool, self.steps.meters)

    @property
    def idle(self) -> bool:
        return self.steps.idle

    def kill(self) -> None:
        """All that it held is lost, and its callers hear so."""
        self.steps.settle()
        self.alive, self.steps.stopped = False, True
        for caller in list(self.callers):
            caller.lost()

    def _changed(self) -> None:
        self.steps.blocked = False
        self._told()

    def _told(self) -> None:
        """Plan once all that happens at this moment has happened."""
        if not self._planned:
            self._planned = True
            self._loop.at(self._loop.now(), self._plan)
        self._touched(self)

    def _plan(self) -> None:
        self._planned = False
        if not self.alive or self.steps.striding:
            return
        for sequence in self.scheduler.announce():
            self.steps.owners[sequence.number].ready()
        self.steps.submit()
        if self._waiters and self.scheduler.made_room():
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter()


Touched = Callable[[Replica], None]
"""Hears that a replica's figures may have changed."""
