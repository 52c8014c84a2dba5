"""A part of a run: the warm-up of a level or the level itself, dealt out to the workers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import msgspec

from ekiden.bench.arrivals import arrivals, schedule
from ekiden.bench.config import BenchConfig, Load
from ekiden.bench.errand import Errand, Target
from ekiden.bench.trace import Traced
from ekiden.core.errors import SetupError

LEAD_S = 0.25
"""From the order to a worker to its first request."""
GRACE_S = 30.0


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """All requests of a part, before they are dealt out."""

    name: str
    first: int
    moments: list[float] = []
    concurrency: int = 0
    count: int = 0
    duration_s: float = 0.0

    @classmethod
    def warmup(cls, config: BenchConfig, load: Load, first: int) -> Phase:
        """In a closed loop of the level's own breadth; a schedule would take its time."""
        width = int(load.value) if load.kind == "concurrency" else config.warmups
        width = min(width, config.warmups)
        return cls(name="warm-up", first=first, concurrency=width, count=config.warmups)

    @classmethod
    def measured(cls, config: BenchConfig, load: Load, first: int) -> Phase:
        if load.kind == "concurrency":
            return cls(
                name=load.name,
                first=first,
                concurrency=int(load.value),
                count=config.count,
                duration_s=config.duration_s,
            )
        moments = schedule(
            _moments(config, load, first), count=config.count, duration_s=config.duration_s
        )
        return cls(name=load.name, first=first, moments=moments)

    @property
    def total(self) -> int:
        return len(self.moments) or self.count

    @property
    def lasts_s(self) -> float:
        """How long requests may be sent, as far as that is known beforehand; else 0."""
        return self.moments[-1] if self.moments else self.duration_s


def _moments(config: BenchConfig, load: Load, first: int) -> Iterator[float]:
    if isinstance(config.workload, Traced):
        moments = config.workload.moments[first:]
        if not moments:
            raise SetupError(
                f"--num-warmups {first} leaves no request of the trace: at most "
                f"{len(config.workload.moments) - 1}"
            )
        return ((moment - moments[0]) / load.value for moment in moments)
    return arrivals(config.arrival, load.value, burst=config.burst, seed=config.seed)


def limit_s(config: BenchConfig, phase: Phase) -> float:
    """By when a phase must be over, whatever the server does."""
    slots = phase.concurrency or config.max_in_flight
    turns = 1 if phase.lasts_s and not phase.count else math.ceil(phase.total / slots) + 1
    return LEAD_S + phase.lasts_s + turns * config.timeout_s + GRACE_S


def errands(config: BenchConfig, size: int, target: Target, phase: Phase) -> list[Errand]:
    """The requests are dealt out one by one, the places of a closed loop too."""
    start = time.monotonic() + LEAD_S
    # A worker without a place gets no requests either.
    busy = min(size, phase.concurrency) or size

    def share(total: int, worker: int) -> int:
        return len(range(worker, total, busy)) if worker < busy else 0

    return [
        Errand(
            target=target,
            workload=config.workload,
            first=phase.first + i,
            step=busy,
            start=start,
            moments=tuple(phase.moments[i::busy]),
            max_in_flight=max(1, share(config.max_in_flight, i)),
            concurrency=share(phase.concurrency, i),
            count=share(phase.count, i) if phase.concurrency else 0,
            duration_s=phase.duration_s,
        )
        for i in range(size)
    ]
