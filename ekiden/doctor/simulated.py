"""From the result of ``ekiden sim`` to situations, one a run: what the users of replicas that do
not exist would have felt."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ekiden.doctor.benches import times
from ekiden.doctor.evidence import Answers, Experts, Situation
from ekiden.measures.experts import ExpertLoad
from ekiden.measures.spread import Spread


class Pool(msgspec.Struct, frozen=True):
    role: str
    experts: ExpertLoad | None = None


class Run(msgspec.Struct, frozen=True):
    name: str
    succeeded: int
    errors: dict[str, int]
    duration_s: float
    output_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    prompt_tokens: Spread
    output_tokens: Spread
    phases_ms: dict[str, Spread]
    prompt_sources: dict[str, int]
    fallbacks: dict[str, int]
    preemptions: int
    pools: list[Pool]


class Simulation(msgspec.Struct, frozen=True):
    runs: list[Run]


def situations(name: str, found: Simulation) -> Iterator[Situation]:
    """``name``: what the operator calls the file."""
    for run in found.runs:
        yield Situation(
            name=f"{name}, {run.name}",
            seconds=run.duration_s,
            answers=_answers(run),
            experts=tuple(
                experts(pool.role, pool.experts) for pool in run.pools if pool.experts is not None
            ),
        )


def _answers(run: Run) -> Answers:
    preempted = {"preempted": run.preemptions} if run.preemptions else {}
    return Answers(
        count=run.succeeded,
        errors=run.errors,
        tokens_per_s=run.output_tokens_per_s,
        ttft=times(run.ttft_ms),
        tpot=times(run.tpot_ms),
        phases={phase: spread.mean / 1000 for phase, spread in run.phases_ms.items()},
        prompt_tokens=run.prompt_tokens.mean,
        output_tokens=run.output_tokens.mean,
        sources=dict(run.prompt_sources),
        fallbacks=run.fallbacks | preempted,
    )


def experts(role: str, load: ExpertLoad) -> Experts:
    """What is judged of the histogram: its hottest expert, in the mean of the layers."""
    means = [sum(layer) / len(layer) for layer in load.tokens]
    hottest = [max(layer) / mean for layer, mean in zip(load.tokens, means, strict=True) if mean]
    return Experts(
        role=role,
        steps=load.steps,
        tokens=sum(means) / len(means) if means else 0.0,
        hottest=sum(hottest) / len(hottest) if hottest else 0.0,
        balancedness=load.balancedness,
        dispatch_share=load.dispatch_share,
    )
