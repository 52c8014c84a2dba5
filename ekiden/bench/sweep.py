"""A run: look at the server, then a level after another, each with its own warm-up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ekiden import __version__
from ekiden.bench import figures, preflight
from ekiden.bench.arrivals import arrivals, schedule
from ekiden.bench.asking import Dialect
from ekiden.bench.crew import Crew, crew
from ekiden.bench.errand import Errand, Finished, Target
from ekiden.bench.histogram import Histogram
from ekiden.bench.http import Address, Server
from ekiden.bench.record import Record
from ekiden.bench.result import Level, Result, Slo
from ekiden.bench.service import service, watching
from ekiden.bench.trace import Traced
from ekiden.bench.workload import Drawn
from ekiden.core.clock import MonotonicClock
from ekiden.core.errors import SetupError

LEAD_S = 0.25
"""From the order to a worker to its first request."""
GRACE_S = 30.0

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One level's load. ``kind``: ``rate``, ``concurrency`` or ``trace``."""

    kind: str
    value: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.value:g}"


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, as the command line has it."""

    url: str
    model: str = ""
    api_key: str = ""
    dialect: Dialect = Dialect()
    tokenizer: Path | None = None
    workload: Drawn | Traced
    workload_name: str
    loads: tuple[Load, ...]
    arrival: str = "poisson"
    burst: int = 1
    seed: int = 0
    count: int = 100
    """Requests of a level; 0: as many as come within ``duration_s``."""
    duration_s: float = 0.0
    warmups: int = 4
    processes: int = 1
    max_in_flight: int = 1024
    timeout_s: float = 600.0
    slo: Slo = Slo()


async def run(
    config: BenchConfig, progress: Progress, finished: Callable[[Result], None]
) -> Result:
    """Every level in turn. ``finished`` gets the result so far after each.

    Raises:
        SetupError: the server cannot be measured, or the workload does not fit it.
    """
    address = Address(config.url)
    model = config.model or await preflight.first_model(address, config.api_key)
    found = await _look(config, address, model)
    _check_lengths(config, found.wording.least)
    result = _blank(config, address, model, found)
    target = Target(
        url=config.url,
        model=model,
        api_key=config.api_key,
        dialect=found.dialect,
        wording=found.wording,
        timeout_s=config.timeout_s,
    )
    async with crew(config.processes) as workers:
        for number, load in enumerate(config.loads):
            measured = await _level(config, workers, target, address, load, number, progress)
            result = msgspec.structs.replace(result, levels=[*result.levels, measured])
            finished(result)
    return result


async def _look(config: BenchConfig, address: Address, model: str) -> preflight.Found:
    server = Server(address, api_key=config.api_key, clock=MonotonicClock())
    try:
        return await preflight.find(
            server,
            config.dialect,
            model=model,
            timeout_s=config.timeout_s,
            tokenizer=config.tokenizer,
        )
    finally:
        await server.close()


def _check_lengths(config: BenchConfig, least: int) -> None:
    shortest = config.workload.shortest_prompt()
    if shortest < least and isinstance(config.workload, Drawn):
        raise SetupError(
            f"--prompt-tokens {shortest} cannot be: the server adds {least - 1} tokens to any "
            f"prompt, so {least} is the least"
        )


def _blank(config: BenchConfig, address: Address, model: str, found: preflight.Found) -> Result:
    notes = list(found.notes)
    if isinstance(config.workload, Traced) and (left := config.workload.left_out):
        notes.append(f"{left} requests of the trace are over --max-model-len and were left out")
    return Result(
        version=__version__,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        url=address.root,
        model=model,
        endpoint=config.dialect.endpoint,
        workload=config.workload_name,
        arrival=config.arrival,
        seed=config.seed,
        processes=config.processes,
        prompts=found.wording.how,
        slo=config.slo,
        notes=notes,
        levels=[],
    )


async def _level(
    config: BenchConfig,
    workers: Crew,
    target: Target,
    address: Address,
    load: Load,
    number: int,
    progress: Progress,
) -> Level:
    """Requests are numbered through the whole run, so that none finds its own prompt cached."""
    first = number << 32 if isinstance(config.workload, Drawn) else 0
    if config.warmups:
        await _phase(config, workers, target, _Part.warmup(config, load, first), progress)
    part = _Part.measured(config, load, first + config.warmups)
    async with watching(address) as gauges:
        records, done = await _phase(config, workers, target, part, progress)
    gaps = Histogram()
    for one in done:
        gaps.merge(one.gaps)
    return figures.level(
        name=load.name,
        load=load.kind,
        value=load.value,
        records=records,
        gaps=gaps,
        client_cpu=max(one.cpu_share for one in done),
        slo=config.slo,
        service=service(records, gauges.spreads(), gauges.splits),
    )


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A phase: all of its requests, before they are dealt to the workers."""

    name: str
    first: int
    moments: list[float] = []
    concurrency: int = 0
    count: int = 0
    duration_s: float = 0.0

    @classmethod
    def warmup(cls, config: BenchConfig, load: Load, first: int) -> _Part:
        """In a closed loop of the level's own breadth; a schedule would take its time."""
        width = int(load.value) if load.kind == "concurrency" else config.warmups
        width = min(width, config.warmups)
        return cls(name="warm-up", first=first, concurrency=width, count=config.warmups)

    @classmethod
    def measured(cls, config: BenchConfig, load: Load, first: int) -> _Part:
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


async def _phase(
    config: BenchConfig, workers: Crew, target: Target, part: _Part, progress: Progress
) -> tuple[list[Record], list[Finished]]:
    records: list[Record] = []

    def heard(record: Record) -> None:
        records.append(record)
        _show(part, record, len(records), progress)

    errands = _errands(config, workers.size, target, part)
    limit = _limit_s(config, part)
    done = await workers.run(errands, heard, within_s=limit)
    progress(part.name, len(records), len(records))
    return records, done


def _show(part: _Part, record: Record, done: int, progress: Progress) -> None:
    """By requests where their number is known, else by time."""
    if part.total:
        progress(part.name, min(done, part.total - 1), part.total)
    else:
        passed = min(record.ended_s, part.duration_s)
        progress(part.name, int(passed), math.ceil(part.duration_s) + 1)


def _limit_s(config: BenchConfig, part: _Part) -> float:
    """By when a phase must be over, whatever the server does."""
    slots = part.concurrency or config.max_in_flight
    turns = 1 if part.lasts_s and not part.count else math.ceil(part.total / slots) + 1
    return LEAD_S + part.lasts_s + turns * config.timeout_s + GRACE_S


def _errands(config: BenchConfig, size: int, target: Target, part: _Part) -> list[Errand]:
    """The requests are dealt out one by one, the places of a closed loop too."""
    start = time.monotonic() + LEAD_S
    # A worker without a place gets no requests either.
    busy = min(size, part.concurrency) or size

    def share(total: int, worker: int) -> int:
        return len(range(worker, total, busy)) if worker < busy else 0

    return [
        Errand(
            target=target,
            workload=config.workload,
            first=part.first + i,
            step=busy,
            start=start,
            moments=tuple(part.moments[i::busy]),
            max_in_flight=max(1, share(config.max_in_flight, i)),
            concurrency=share(part.concurrency, i),
            count=share(part.count, i) if part.concurrency else 0,
            duration_s=part.duration_s,
        )
        for i in range(size)
    ]
