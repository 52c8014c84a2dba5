"""A result as text: a row a level, then what is to be known of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ekiden.bench.result import Level, Result, Service, Spread

_HEAD = (
    "load", "requests", "failed", "req/s", "out tok/s", "TTFT p50", "p95", "p99", "TPOT p50",
    "p95", "p99", "ITL p50", "p99", "E2E p50", "p99", "goodput",
)  # fmt: skip


def table(result: Result) -> str:
    """Milliseconds, requests and tokens; every note stands below."""
    lines = [
        f"{result.model} at {result.url}, {result.endpoint}, {result.workload}",
        f"prompts: {result.prompts}",
        *_aligned([_HEAD, *(_row(level) for level in result.levels)]),
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
    good = level.goodput
    return (
        level.name,
        str(level.requests),
        str(level.requests - level.succeeded),
        f"{level.requests_per_s:.2f}",
        f"{level.output_tokens_per_s:,.0f}",
        *_points(level.ttft_ms, "p50", "p95", "p99"),
        *_points(level.tpot_ms, "p50", "p95", "p99"),
        *_points(level.itl_ms, "p50", "p99"),
        *_points(level.e2e_ms, "p50", "p99"),
        "-" if good is None else f"{good.requests_per_s:.2f}/s ({good.share:.0%})",
    )


def _points(spread: Spread, *names: str) -> list[str]:
    return [milliseconds(getattr(spread, name)) if spread.count else "-" for name in names]


def milliseconds(value: float) -> str:
    """Three figures that count, whole numbers above 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


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
    total = sum(service.prompt_sources.values()) or 1
    parts = [
        f"{name.replace('_', ' ')} {count / total:.0%}"
        for name, count in service.prompt_sources.items()
        if count
    ]
    yield f"prompt tokens from {', '.join(parts)}"
    phases = [f"{name} {milliseconds(s.mean)}" for name, s in service.phases_ms.items()]
    yield f"mean ms of {', '.join(phases)}"
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


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
