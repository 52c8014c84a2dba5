"""A result as text: a row a level, then what is to be known of it."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.bench.result import Level, Result, Service
from ekiden.measures.columns import aligned
from ekiden.measures.table import by_source, means, of_goodput, points

_HEAD = (
    "load", "requests", "failed", "req/s", "out tok/s", "TTFT p50", "p95", "p99", "TPOT p50",
    "p95", "p99", "ITL p50", "p99", "E2E p50", "p99", "goodput",
)  # fmt: skip


def table(result: Result) -> str:
    """Milliseconds, requests and tokens; every note stands below."""
    lines = [
        f"{result.model} at {result.url}, {result.endpoint}, {result.workload}",
        f"prompts: {result.prompts}",
        *aligned([_HEAD, *(_row(level) for level in result.levels)], figures=True),
        *(f"note: {note}" for note in notes(result)),
        *(
            f"{level.name}: {line}"
            for level in result.levels
            if level.service is not None
            for line in service_lines(level.service)
        ),
    ]
    return "\n".join(lines)


def notes(result: Result) -> list[str]:
    """All that a reader of the figures must know beside them."""
    return [*result.notes, *(note for level in result.levels for note in _below(level))]


def _row(level: Level) -> tuple[str, ...]:
    return (
        level.name,
        str(level.requests),
        str(level.requests - level.succeeded),
        f"{level.requests_per_s:.2f}",
        f"{level.output_tokens_per_s:,.0f}",
        *points(level.ttft_ms, "p50", "p95", "p99"),
        *points(level.tpot_ms, "p50", "p95", "p99"),
        *points(level.itl_ms, "p50", "p99"),
        *points(level.e2e_ms, "p50", "p99"),
        of_goodput(level.goodput),
    )


def _below(level: Level) -> Iterator[str]:
    head = f"{level.name}:"
    for kind, count in level.errors.items():
        yield f"{head} {count} failed, {kind}: {level.error_details.get(kind, '')}"
    if level.short_answers:
        yield f"{head} {level.short_answers} answers were shorter than asked"
    if not level.counted_by_server and level.succeeded:
        yield f"{head} the server told no usage: tokens are counted as events"
    yield from (f"{head} {note}" for note in level.notes)


def service_lines(service: Service) -> Iterator[str]:
    """What our own services told."""
    yield f"prompt tokens from {by_source(service.prompt_sources)}"
    yield f"mean ms of {means(service.phases_ms)}"
    for role, worst in service.imbalance.items():
        count = sum(share.role == role for share in service.replicas)
        if count > 1:
            yield f"{count} {role} replicas, the busiest had {worst:.2f} of the mean"
    for wire, moved in service.wires.items():
        yield f"{moved / 1e6:,.1f} MB of KV over {wire}"
    for kind, count in service.fallbacks.items():
        yield f"{count} served another way: {kind}"
    for name, places in service.gauges.items():
        shown = [
            f"{where} {spread.mean:.3g}, {spread.max:.3g}".strip()
            for where, spread in places.items()
            if spread.max
        ]
        if shown:
            yield f"{name} (mean, most): {'; '.join(shown)}"
