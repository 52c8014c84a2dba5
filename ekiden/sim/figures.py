"""From the records of a run to its figures, by the definitions of ``ekiden bench`` (docs/bench.md).

What a bench result has too is of ``ekiden.measures.run``, so that the two can be compared.
Durations are milliseconds in fields that end in ``_ms``, seconds in those that end in ``_s``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from ekiden.measures.experts import ExpertLoad
from ekiden.measures.goodput import Slo
from ekiden.measures.run import Run, Samples, common, in_order, samples
from ekiden.measures.spread import Spread, ms, rate
from ekiden.sim.pools import ROLES
from ekiden.sim.record import Record
from ekiden.sim.run import Outcome, Span

SCHEMA = "ekiden.sim/1"
"""Of what `ekiden sim --json` prints. Changes when a field's meaning does."""
SOURCES = ("decode_cache", "prefill_cache", "prefill_computed", "local_computed")


class Pool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The replicas of one role."""

    role: str
    replicas: int
    """Those of the beginning and whatever came later; a second life counts once more."""
    gpu_hours: float
    busy_share: float
    """Of the time of its lives, that with a step in flight."""
    link_share: float
    """The same, with KV on its link."""
    imbalance: float
    """Tokens of its busiest replica over the mean: prompt tokens of prefill, output tokens of
    decode; 1 is even."""
    experts: ExpertLoad | None = None
    """Where ``--expert-skew`` has them hit unevenly."""


class Figures(Run, frozen=True, kw_only=True):
    """One run."""

    left_out: int
    """Requests of the trace that are longer than a replica takes."""
    phases_ms: dict[str, Spread]
    """Parts of E2E: waiting, prefill, and what the second token waits for KV beside decoding."""
    prompt_sources: dict[str, int]
    """Prompt tokens by the place that their KV came from."""
    cache_hit_share: float
    fallbacks: dict[str, int]
    preemptions: int
    killed: int
    moved_bytes: int
    pools: list[Pool]


def figures(name: str, outcome: Outcome, slo: Slo, *, left_out: int = 0) -> Figures:
    """All figures of a run."""
    rows = in_order(outcome.records)
    good = [row for row in rows if row.ok]
    prompt = sum(row.prompt_tokens for row in good)
    sources = {source: sum(getattr(row, source) for row in good) for source in SOURCES}
    return Figures(
        name=name,
        left_out=left_out,
        samples=Samples(**samples(rows)),
        phases_ms=_phases(good),
        prompt_sources=sources,
        cache_hit_share=(sources["decode_cache"] + sources["prefill_cache"]) / (prompt or 1),
        fallbacks=dict(Counter(kind for row in rows for kind in row.fallbacks)),
        preemptions=sum(row.preemptions for row in rows),
        killed=outcome.killed,
        moved_bytes=sum(row.moved_bytes for row in rows),
        pools=[_pool(role, outcome) for role in ROLES if _spans(role, outcome)],
        **common(rows, slo),
    )


def _phases(good: Sequence[Record]) -> dict[str, Spread]:
    """Where the time went: queue, prefill, transfer (after the first token), decode."""
    found: dict[str, list[float]] = {"queue": [], "prefill": [], "transfer": [], "decode": []}
    for row in good:
        started, first = row.started_s or row.asked.due_s, row.asked.due_s + row.ttft_s
        ready = max(first, row.ready_s or first)
        found["queue"].append(started - row.asked.due_s)
        found["prefill"].append(first - started)
        found["transfer"].append(ready - first)
        found["decode"].append(row.asked.due_s + row.e2e_s - ready)
    return {phase: ms(values) for phase, values in found.items()}


def _spans(role: str, outcome: Outcome) -> list[Span]:
    return [span for span in outcome.spans if span.role == role]


def _pool(role: str, outcome: Outcome) -> Pool:
    spans = _spans(role, outcome)
    seconds = sum(span.seconds for span in spans)
    return Pool(
        role=role,
        replicas=len(spans),
        gpu_hours=sum(span.seconds * span.gpus for span in spans) / 3600,
        busy_share=rate(sum(span.busy_s for span in spans), seconds),
        link_share=rate(sum(span.wire_s for span in spans), seconds),
        imbalance=_imbalance(role, outcome),
        experts=outcome.experts.get(role),
    )


def _imbalance(role: str, outcome: Outcome) -> float:
    tokens = Counter(dict.fromkeys((span.name for span in _spans(role, outcome)), 0))
    for row in outcome.records:
        if row.ok and (replica := getattr(row, f"{role}_replica")):
            tokens[replica] += row.asked.prompt if role == "prefill" else row.asked.output
    mean = tokens.total() / len(tokens)
    return max(tokens.values()) / mean if mean else 1.0
