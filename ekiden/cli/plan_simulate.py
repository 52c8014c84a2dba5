"""``ekiden plan --simulate``: what was chosen, under simulated traffic beside what was computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError
from ekiden.measures.goodput import Slo
from ekiden.planner.decision import Decision
from ekiden.planner.neighbours import beside
from ekiden.planner.options import DISAGGREGATED
from ekiden.planner.trace import read_trace
from ekiden.sim.asked import Asked, drawn, replayed
from ekiden.sim.figures import Figures, figures
from ekiden.sim.run import Progress, longest, simulate
from ekiden.sim.scenario import Scenario

SECONDS, LIVES = 60.0, 4.0
"""Simulated: so long, or so many times the life of a request, whichever is longer ..."""
FEWEST, MOST = 200, 10_000
"""... but so many requests."""
TRACED = 4000
"""Of a trace: its caches fill slowly, and it may begin with a burst."""
WARM_UP = 0.25
"""Of the requests, the first, which meet empty replicas: they count for nothing."""
KINDER = 1.2
"""Times the simulated TPOT from which the computed one is called the better."""
_QUANTILES = (50, 95, 99)


def simulated(
    decision: Decision, trace: Path | None, progress: Progress | None = None
) -> dict[str, Any]:
    """TTFT and TPOT in seconds as the report has them, and which objectives were missed.

    Raises:
        SetupError: nothing was chosen that could serve.
    """
    chosen = decision.chosen
    if chosen.refused or chosen.latency.limit or not chosen.gpus:
        raise SetupError(
            f"--simulate: {chosen.name} cannot serve ({chosen.refused or chosen.latency.limit}): "
            "choose more GPUs, a lower --rate, or leave --simulate out"
        )
    world = scenario(decision)
    asked = requests(decision, world, trace)
    outcome = simulate(world, asked, progress)
    counted = [row for row in outcome.records if row.asked.number >= WARM_UP * len(asked)]
    found = figures("", msgspec.structs.replace(outcome, records=counted), Slo())
    return _told(decision, found, len(asked))


def scenario(decision: Decision) -> Scenario:
    """The chosen pools without their spare replicas, under the gateway's router."""
    asked, chosen = decision.asked, decision.chosen
    steppers = [asked.stepper(layout, chosen.form) for layout in chosen.layouts]
    counts = [count - asked.spare for count in chosen.replicas]
    pools = (counts[0] if chosen.kind == DISAGGREGATED else 0, counts[-1])
    prefill, decode = beside(steppers[0], steppers[-1], asked.work, chosen.rate, pools)
    return Scenario(
        prefill=pools[0], decode=pools[1], prefill_stepper=prefill, decode_stepper=decode
    ).check()


def requests(decision: Decision, world: Scenario, trace: Path | None) -> list[Asked]:
    """At the rate that was computed: the trace's own, or drawn ones of the same kinds."""
    rate, work = decision.chosen.rate, decision.asked.work
    latency = decision.chosen.latency
    if trace is None:
        life = latency.ttft_p50 + latency.tpot_p50 * work.output
        count = round(min(MOST, max(FEWEST, rate * max(SECONDS, LIVES * life))))
        return drawn(work, rate, count, random.Random("plan"))
    lines = read_trace(trace)[:TRACED]
    seconds = (lines[-1].timestamp - lines[0].timestamp) / 1e3
    speed = rate * seconds / (len(lines) - 1) if seconds else 1.0
    return replayed(lines, speed=speed, longest=longest(world))


def _told(decision: Decision, found: Figures, asked: int) -> dict[str, Any]:
    spreads = {"ttft": found.ttft_ms, "tpot": found.tpot_ms}
    latency = {
        f"{what}_p{q}": getattr(spread, f"p{q}") / 1e3 if spread.count else None
        for what, spread in spreads.items()
        for q in _QUANTILES
    }
    objectives = decision.asked.objectives.stated()
    return {
        "requests": asked,
        "counted": found.requests,
        "failed": found.requests - found.succeeded,
        "rate": decision.chosen.rate,
        "latency": latency,
        "missed": {
            name: seconds
            for name, most in objectives.items()
            if (seconds := latency[name]) is not None and seconds > most
        },
        "cache_hit_share": found.cache_hit_share,
        "busy_share": {pool.role: pool.busy_share for pool in found.pools},
    }


def section(plan: dict[str, Any]) -> str:
    """The simulation of a report, as the page shows it."""
    return "\n".join(("Simulated", *_lines(plan)))


def _lines(plan: dict[str, Any]) -> Iterator[str]:
    told, planned = plan["simulated"], plan["chosen"]["latency"]
    yield f"  {'':<6} {'P50':>12} {'P95':>12} {'P99':>12}   computed"
    for what in ("ttft", "tpot") if told["latency"]["tpot_p50"] is not None else ("ttft",):
        cells, beside = (
            [_shown(latency[f"{what}_p{q}"]) for q in _QUANTILES]
            for latency in (told["latency"], planned)
        )
        row = " ".join(f"{cell:>12}" for cell in cells)
        yield f"  {what.upper():<6} {row}   {', '.join(beside)}"
    busy = ", ".join(f"{role} {share:.0%}" for role, share in told["busy_share"].items())
    yield (
        f"  {told['requests']:,} requests at {told['rate']:.3g}/s through the gateway's router and "
        f"the engine's scheduler, the first {WARM_UP:.0%} not counted"
    )
    yield f"  busy: {busy}; {told['cache_hit_share']:.0%} of prompt tokens were cached"
    missed = [f"{name.upper().replace('_', ' ')} {_shown(s)}" for name, s in told["missed"].items()]
    yield f"  objectives missed: {', '.join(missed)}" if missed else "  every objective was kept"
    computed, seen = planned["tpot_p50"], told["latency"]["tpot_p50"]
    if computed and seen and computed > KINDER * seen:
        yield "  So near the most that is served, batches grow for longer than was simulated:"
        yield "  believe the computed TPOT, or ask for less than the most with --rate"
    if told["failed"]:
        yield f"  {told['failed']:,} requests failed"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
