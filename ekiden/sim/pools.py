"""The replicas of a simulation: started, killed, replaced, drained."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial

from ekiden.engine.scheduling.schedule import Limits
from ekiden.registry.record import DRAINING
from ekiden.sim.costs import Costs
from ekiden.sim.experts import Experts
from ekiden.sim.loop import Loop
from ekiden.sim.prompts import Prompts
from ekiden.sim.registry import Life, Registry
from ekiden.sim.replica import Replica
from ekiden.sim.scenario import Scenario
from ekiden.sim.steps import Setup

ROLES = ("prefill", "decode")


class Pools:
    """Who lives. ``lives`` are those that can be reached."""

    def __init__(
        self,
        scenario: Scenario,
        loop: Loop,
        prompts: Prompts,
        registry: Registry,
        rng: random.Random,
        experts: Mapping[str, Experts],
    ) -> None:
        """``experts``: by role, where they are hit unevenly."""
        self.lives: dict[Life, Replica] = {}
        self.spans: list[tuple[Replica, float]] = []
        """Every life that there was, and when it began."""
        self.ends: dict[Life, float] = {}
        self.killed = 0
        self._scenario, self._loop = scenario, loop
        self._prompts, self._registry, self._rng = prompts, registry, rng
        self._setups = {role: setup(scenario, role, experts.get(role)) for role in ROLES}
        self._names = {"prefill": 0, "decode": 0}
        self._epochs = 0

    def open(self) -> None:
        """Start those of the scenario; its gateway knows them."""
        for role, count in zip(ROLES, (self._scenario.prefill, self._scenario.decode), strict=True):
            for _ in range(count):
                self.start(role, known=True)
        for kill in self._scenario.kills:
            self._loop.at(kill.at_s, partial(self._kill_named, f"{kill.role}-{kill.number}"))

    def start(self, role: str, *, name: str = "", known: bool = False) -> Replica:
        """A new life, of a new replica or of one that has been before."""
        if not name:
            name = f"{role}-{self._names[role]}"
            self._names[role] += 1
        self._epochs += 1
        replica = Replica(
            name, self._epochs, self._setups[role], self._prompts, self._loop, self._touched
        )
        self.lives[name, self._epochs] = replica
        self.spans.append((replica, self._loop.now()))
        self._registry.add(replica, self._scenario.block_size, known=known)
        if self._scenario.mtbf_s:
            after = self._rng.expovariate(1 / self._scenario.mtbf_s)
            self._loop.after(after, lambda: self.kill(replica))
        return replica

    def kill(self, replica: Replica) -> None:
        """It dies; it is back, as another life, some time later."""
        if not replica.alive:
            return
        self._end(replica)
        self.killed += 1
        self._registry.expire((replica.name, replica.epoch))
        replica.kill()
        role, name = replica.setup.role, replica.name
        self._loop.after(self._scenario.mttr_s, lambda: self._back(role, name))

    def drain(self, replica: Replica) -> None:
        """Let it finish what it holds, then leave."""
        replica.draining = True
        self._registry.mark(replica, DRAINING)
        self._retire(replica)

    def of(self, role: str) -> Iterator[Replica]:
        """Those that take work, the oldest first."""
        return (r for r in self.lives.values() if r.setup.role == role and not r.draining)

    def _back(self, role: str, name: str) -> None:
        self.start(role, name=name)

    def _kill_named(self, name: str) -> None:
        for replica in list(self.lives.values()):
            if replica.name == name:
                self.kill(replica)

    def _touched(self, replica: Replica) -> None:
        self._registry.touched(replica)
        if replica.draining:
            self._loop.after(0, lambda: self._retire(replica))

    def _retire(self, replica: Replica) -> None:
        if replica.alive and replica.idle and not replica.callers:
            self._end(replica)
            replica.alive = False
            self._registry.remove((replica.name, replica.epoch))

    def _end(self, replica: Replica) -> None:
        life = (replica.name, replica.epoch)
        self.ends[life] = self._loop.now()
        del self.lives[life]


def setup(scenario: Scenario, role: str, experts: Experts | None) -> Setup:
    """What the replicas of a pool have in common, from the planner's sums."""
    stepper = scenario.steppers[role]
    layout, resolved = stepper.replica.layout, stepper.replica.resolved
    return Setup(
        role=role,
        costs=Costs(stepper),
        blocks=scenario.blocks_of(stepper),
        limits=Limits(
            block_size=scenario.block_size,
            max_num_batched_tokens=stepper.chunk * layout.dp,
            max_num_seqs=resolved.max_num_seqs * layout.dp,
            micro_batches=layout.pp,
        ),
        gpus=layout.gpus,
        # What a draw makes of a step is not known beforehand.
        strides=scenario.strides and experts is None,
        experts=experts,
    )
