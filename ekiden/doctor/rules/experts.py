"""R46: a mixture of experts whose steps wait for the rank with the hottest experts."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import Answers, Evidence, Experts, Situation
from ekiden.doctor.finding import Cause, confidence, weighed
from ekiden.doctor.rules.words import share, time


def hot_experts(evidence: Evidence) -> Iterator[Cause]:
    for situation, answers in evidence.answered:
        for load in situation.experts:
            if _is_hot(load) and _is_felt(answers, load):
                yield from _causes(situation, answers, load)


def _is_hot(load: Experts) -> bool:
    """Few tokens fall unevenly on experts that are all alike, so the histogram must say so too."""
    popular = load.hottest > at.HOT_EXPERT and load.tokens >= at.ENOUGH_TOKENS
    return popular and 1 / load.balancedness.p95 > at.HOT_RANK


def _is_felt(answers: Answers, load: Experts) -> bool:
    return load.dispatch_share > at.DISPATCH or _tail(answers) > at.TAIL


def _tail(answers: Answers) -> float:
    return answers.tpot.p99 / answers.tpot.p50 if answers.tpot.p50 else 0.0


def _causes(situation: Situation, answers: Answers, load: Experts) -> Iterator[Cause]:
    usual, high = 1 / load.balancedness.p50, 1 / load.balancedness.p95
    sure = confidence(high, at.HOT_RANK, load.steps, at.ENOUGH_STEPS)
    seen = _seen(answers, load)
    swings = high / usual > at.SWING
    if usual > at.HOT_RANK:
        yield weighed(_always(load), sure * (0.8 if swings else 1.0), seen, situation)
    if swings or usual <= at.HOT_RANK:
        yield weighed(_by_kind(load), sure * (1.0 if swings else 0.8), seen, situation)


def _always(load: Experts) -> Cause:
    return Cause(
        what=f"hot experts of {load.role}: in most steps the other ranks wait for those that "
        "hold them",
        seen="",
        remedy="redundant copies of the hottest experts, and a placement by what each has of the "
        "tokens; then more ranks for the experts: what a larger -dp with --enable-expert-parallel "
        "gives, `ekiden sim` tells",
        confidence=1.0,
    )


def _by_kind(load: Experts) -> Cause:
    return Cause(
        what=f"hot experts of {load.role} that change with the kinds of prompts in a step",
        seen="",
        remedy="spread the kinds of prompts over the replicas, so that each step has some of all; "
        "then redundant copies of the hottest experts, which are chosen anew as the load changes, "
        "and more ranks for the experts",
        confidence=1.0,
    )


def _seen(answers: Answers, load: Experts) -> str:
    even, tpot = load.balancedness, answers.tpot
    return (
        f"the busiest rank has {1 / even.p50:.2f} of the mean at P50, {1 / even.p95:.2f} at P95 "
        f"and {1 / even.worst:.2f} at worst; the hottest expert {load.hottest:.1f} of a mean one; "
        f"dispatch and combine {share(load.dispatch_share)} of a step; TPOT P50 {time(tpot.p50)}, "
        f"P99 {time(tpot.p99)}"
    )
