"""A run: look at the server, then a level after another, each with its own warm-up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from ekiden import __version__
from ekiden.bench import figures, preflight
from ekiden.bench.config import BenchConfig, Load
from ekiden.bench.crew import Crew, crew
from ekiden.bench.errand import Finished, Target
from ekiden.bench.histogram import Histogram
from ekiden.bench.http import Address, Server
from ekiden.bench.phase import Phase, errands, limit_s
from ekiden.bench.record import Record
from ekiden.bench.result import Level, Result
from ekiden.bench.service import service, watching
from ekiden.bench.trace import Traced
from ekiden.bench.workload import Drawn
from ekiden.core.clock import MonotonicClock
from ekiden.core.errors import SetupError

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


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
        await _phase(config, workers, target, Phase.warmup(config, load, first), progress)
    phase = Phase.measured(config, load, first + config.warmups)
    async with watching(address) as gauges:
        records, done = await _phase(config, workers, target, phase, progress)
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


async def _phase(
    config: BenchConfig, workers: Crew, target: Target, phase: Phase, progress: Progress
) -> tuple[list[Record], list[Finished]]:
    records: list[Record] = []

    def heard(record: Record) -> None:
        records.append(record)
        _show(phase, record, len(records), progress)

    dealt = errands(config, workers.size, target, phase)
    done = await workers.run(dealt, heard, within_s=limit_s(config, phase))
    progress(phase.name, len(records), len(records))
    return records, done


def _show(phase: Phase, record: Record, done: int, progress: Progress) -> None:
    """Of a phase that ends by time the total is what the pace so far gives."""
    passed = max(record.ended_s, 1e-3)
    total = phase.total or round(done * max(1.0, phase.duration_s / passed))
    progress(phase.name, min(done, total - 1), total)
