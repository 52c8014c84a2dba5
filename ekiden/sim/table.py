"""Runs as text: a row each, then what is to be known of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ekiden.sim.figures import Figures, Pool, Spread

_HEAD = (
    "run", "requests", "failed", "req/s", "out tok/s", "TTFT p50", "p95", "p99", "TPOT p50", "p95",
    "p99", "E2E p50", "p99", "goodput",
)  # fmt: skip


def table(runs: Sequence[Figures]) -> str:
    """Milliseconds, requests and tokens; below them the pools of every run."""
    lines = _aligned([_HEAD, *(_row(run) for run in runs)])
    return "\n".join([*lines, "", *(line for run in runs for line in _below(run))])


def _row(run: Figures) -> tuple[str, ...]:
    good = run.goodput
    return (
        run.name,
        f"{run.requests:,}",
        f"{run.requests - run.succeeded:,}",
        f"{run.requests_per_s:.2f}",
        f"{run.output_tokens_per_s:,.0f}",
        *_points(run.ttft_ms, "p50", "p95", "p99"),
        *_points(run.tpot_ms, "p50", "p95", "p99"),
        *_points(run.e2e_ms, "p50", "p99"),
        "-" if good is None else f"{good.requests_per_s:.2f}/s ({good.share:.0%})",
    )


def _points(spread: Spread, *names: str) -> list[str]:
    return [_figure(getattr(spread, name)) if spread.count else "-" for name in names]


def _figure(value: float) -> str:
    """Three figures that count, whole numbers above 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _below(run: Figures) -> Iterator[str]:
    total = sum(run.prompt_sources.values()) or 1
    parts = [
        f"{name.replace('_', ' ')} {count / total:.0%}"
        for name, count in run.prompt_sources.items()
        if count
    ]
    if parts:
        yield f"{run.name}: prompt tokens from {', '.join(parts)}"
    phases = [f"{name} {_figure(spread.mean)}" for name, spread in run.phases_ms.items()]
    yield f"{run.name}: mean ms of {', '.join(phases)}"
    yield from (f"{run.name}: {_pool(pool)}" for pool in run.pools)
    if run.left_out:
        yield f"{run.name}: {run.left_out:,} requests are longer than a replica takes: left out"
    for kind, count in run.errors.items():
        yield f"{run.name}: {count} failed, {kind}"
    for kind, count in run.fallbacks.items():
        yield f"{run.name}: {count} served another way: {kind}"
    if run.preemptions:
        yield f"{run.name}: {run.preemptions} preempted for want of KV blocks"
    if run.killed:
        yield f"{run.name}: {run.killed} replicas died"


def _pool(pool: Pool) -> str:
    link = f", link {pool.link_share:.0%}" if pool.link_share else ""
    return (
        f"{pool.replicas:,} {pool.role} replicas, busy {pool.busy_share:.0%}{link}, the busiest "
        f"had {pool.imbalance:.2f} of the mean, {pool.gpu_hours:.3g} GPU-hours"
    )


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
