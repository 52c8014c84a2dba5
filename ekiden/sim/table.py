"""Runs as text: a row each, then what is to be known of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ekiden.measures.columns import aligned
from ekiden.measures.experts import ExpertLoad
from ekiden.measures.table import by_source, means, of_goodput, points
from ekiden.sim.figures import Figures, Pool

_HEAD = (
    "run", "requests", "failed", "req/s", "out tok/s", "TTFT p50", "p95", "p99", "TPOT p50", "p95",
    "p99", "E2E p50", "p99", "goodput",
)  # fmt: skip


def table(runs: Sequence[Figures]) -> str:
    """Milliseconds, requests and tokens; below them the pools of every run."""
    lines = aligned([_HEAD, *(_row(run) for run in runs)], figures=True)
    return "\n".join([*lines, "", *(line for run in runs for line in _below(run))])


def _row(run: Figures) -> tuple[str, ...]:
    return (
        run.name,
        f"{run.requests:,}",
        f"{run.requests - run.succeeded:,}",
        f"{run.requests_per_s:.2f}",
        f"{run.output_tokens_per_s:,.0f}",
        *points(run.ttft_ms, "p50", "p95", "p99"),
        *points(run.tpot_ms, "p50", "p95", "p99"),
        *points(run.e2e_ms, "p50", "p99"),
        of_goodput(run.goodput),
    )


def _below(run: Figures) -> Iterator[str]:
    if parts := by_source(run.prompt_sources):
        yield f"{run.name}: prompt tokens from {parts}"
    yield f"{run.name}: mean ms of {means(run.phases_ms)}"
    for pool in run.pools:
        yield f"{run.name}: {_pool(pool)}"
        if pool.experts is not None:
            yield f"{run.name}: {_experts(pool.role, pool.experts)}"
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


def _experts(role: str, load: ExpertLoad) -> str:
    even = load.balancedness
    return (
        f"experts of {role}: the busiest rank had {1 / even.p50:.2f} of the mean at P50, "
        f"{1 / even.p95:.2f} at P95 and {1 / even.worst:.2f} at worst; dispatch and combine, with "
        f"the wait for it, {load.dispatch_share:.0%} of a step"
    )
