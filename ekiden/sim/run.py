"""One simulation from beginning to end: everything is wired here."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ekiden.core.errors import SetupError
from ekiden.measures.experts import ExpertLoad
from ekiden.sim.asked import Asked
from ekiden.sim.autoscaler import Autoscaler
from ekiden.sim.experts import uneven
from ekiden.sim.front import Front
from ekiden.sim.loop import Loop
from ekiden.sim.policies import POLICIES
from ekiden.sim.pools import Pools
from ekiden.sim.prompts import Prompts
from ekiden.sim.record import Record
from ekiden.sim.registry import Registry
from ekiden.sim.replica import Replica
from ekiden.sim.scenario import Scenario

Progress = Callable[[int, int], None]
"""Hears how many requests of how many have ended."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a replica, as it was in the end."""

    role: str
    name: str
    gpus: int
    seconds: float
    """That it lived."""
    busy_s: float
    wire_s: float
    """For which its link was busy."""
    computed_tokens: int
    sampled_tokens: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What happened."""

    records: list[Record]
    spans: list[Span]
    killed: int
    seconds: float
    """Of the simulation, from the first moment to the last."""
    experts: dict[str, ExpertLoad] = {}
    """By role, where they were hit unevenly."""


def simulate(
    scenario: Scenario, asked: Sequence[Asked], progress: Progress | None = None
) -> Outcome:
    """Run ``asked`` through the scenario; the same input gives the same outcome.

    Raises:
        SetupError: the scenario cannot be, or a request can never fit; see ``longest``.
    """
    world = World(scenario.check(), asked)
    with _no_collector():
        world.run(progress)
    return world.outcome()


def longest(scenario: Scenario) -> int:
    """Tokens of the longest request that fits on every replica, prompt and output together."""
    used = [scenario.decode_stepper, *([scenario.prefill_stepper] if scenario.prefill else [])]
    size = scenario.block_size
    return min(min(one.replica.resolved.max_model_len, one.tokens // size * size) for one in used)


class World:
    """The parts of one simulation, for a test to look into."""

    def __init__(self, scenario: Scenario, asked: Sequence[Asked]) -> None:
        _check_fits(asked, longest(scenario))
        self.loop = Loop()
        self._asked = asked
        self._over_at = 0.0
        prompts = Prompts(scenario.decode_stepper.replica.geometry.name, scenario.block_size, asked)
        chance = [random.Random(f"{scenario.seed} {what}") for what in ("router", "ages", "deaths")]
        registry = Registry(self.loop, chance[1], scenario.renew_s, scenario.poll_s)
        self._experts = uneven(scenario.steppers, scenario.expert_skew, scenario.seed, asked)
        self.pools = Pools(scenario, self.loop, prompts, registry, chance[2], self._experts)
        placers = [
            POLICIES[scenario.policy](
                self.loop,
                random.Random(chance[0].random()),
                told=registry.told,
                granule=scenario.block_size,
            )
            for _ in range(scenario.gateways)
        ]
        for placer in placers:
            registry.on_change(placer.keep_only)
        self.front = Front(
            self.loop,
            prompts,
            registry,
            placers,
            self.pools.lives,
            link_rate=link_rate(scenario),
            local_prefill_tokens=scenario.local_prefill_tokens,
            request_s=scenario.decode_stepper.told.request_s,
            timeout_s=scenario.timeout_s,
        )
        self.pools.open()
        if scenario.autoscale is not None:
            Autoscaler(scenario.autoscale, self.pools, registry, self.loop)

    def run(self, progress: Progress | None = None) -> None:
        """Until every request has ended."""
        for one in self._asked:
            self.front.submit(one)
        self.loop.run(self._watched(progress) if progress else self._is_over)
        self._over_at = self.loop.now()

    def _is_over(self) -> bool:
        return not self.front.left

    def _watched(self, progress: Progress) -> Callable[[], bool]:
        total, shown = len(self._asked), -1

        def over() -> bool:
            nonlocal shown
            if (done := total - self.front.left) != shown:
                shown = done
                progress(done, total)
            return done == total

        return over

    def outcome(self) -> Outcome:
        now = self._over_at
        spans = [
            _span(replica, self.pools.ends.get((replica.name, replica.epoch), now) - began)
            for replica, began in self.pools.spans
        ]
        loads = {role: experts.load() for role, experts in self._experts.items()}
        return Outcome(
            records=self.front.records,
            spans=spans,
            killed=self.pools.killed,
            seconds=now,
            experts={role: load for role, load in loads.items() if load is not None},
        )


def link_rate(scenario: Scenario) -> Callable[[Replica, Replica], float]:
    """Bytes/s from a prefill to a decode replica: each rank of the smaller one has its link."""
    prefill, decode = scenario.prefill_stepper, scenario.decode_stepper
    ranks = min(prefill.replica.layout.gpus, decode.replica.layout.gpus)
    gpus = scenario.prefill * prefill.replica.layout.gpus
    gpus += scenario.decode * decode.replica.layout.gpus
    rate = ranks * decode.links.between(crosses_hosts=gpus > decode.devices.per_host)
    return lambda sender, receiver: rate


def _check_fits(asked: Sequence[Asked], most: int) -> None:
    if not asked:
        raise SetupError(f"no request of up to {most} tokens: nothing is left to simulate")
    long = max(one.prompt + one.output for one in asked)
    if long > most:
        raise SetupError(
            f"a request of {long} tokens does not fit on a replica, which takes {most}: choose "
            f"shorter ones, a larger --max-model-len, or more GPUs a replica"
        )


def _span(replica: Replica, seconds: float) -> Span:
    return Span(
        role=replica.setup.role,
        name=replica.name,
        gpus=replica.setup.gpus,
        seconds=seconds,
        busy_s=replica.steps.busy_s,
        wire_s=replica.wire.busy_s,
        computed_tokens=replica.steps.computed_tokens,
        sampled_tokens=replica.steps.sampled_tokens,
    )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Millions of small objects that all live on, with no cycle among most: looking through them
    again and again would take most of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
