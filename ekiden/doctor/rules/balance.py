"""R50: some replicas queue while others of the same pool have room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import DECODE, PREFILL, Evidence, Replica, Situation
from ekiden.doctor.finding import Cause, confidence
from ekiden.doctor.rules.words import listed, share, time


def uneven_load(evidence: Evidence) -> Iterator[Cause]:
    for situation in evidence.situations:
        for role, model in product((PREFILL, DECODE), situation.models):
            pool = [replica for replica in situation.of(role, model) if not replica.lost]
            if len(pool) > 1:
                yield from _queues(situation, pool)
                yield from _shares(situation, role)


def _queues(situation: Situation, pool: Sequence[Replica]) -> Iterator[Cause]:
    most = max(pool, key=_has)
    least = min(pool, key=_has)
    if most.waiting < 1 or least.waiting >= 0.5:
        return
    gap = 1 - _has(least) / _has(most)
    if gap > at.UNEVEN_LOAD:
        yield _unequal(
            f"{_load(most)}; {_load(least)} ({situation.name})",
            confidence(gap, at.UNEVEN_LOAD, most.readings, at.ENOUGH_READINGS),
        )


def _has(replica: Replica) -> float:
    return replica.pending + replica.receiving


def _load(replica: Replica) -> str:
    return (
        f"{replica.id} has {replica.running:.1f} running, {replica.waiting:.1f} waiting, KV "
        f"{share(replica.kv_share)}"
    )


def _shares(situation: Situation, role: str) -> Iterator[Cause]:
    answers = situation.answers
    tokens = answers.shares.get(role, {}) if answers else {}
    if not answers or len(tokens) < 2:
        return
    excess = max(tokens.values()) * len(tokens) / max(sum(tokens.values()), 1)
    if excess > at.IMBALANCE and answers.ttft.p95 > at.JITTER * answers.ttft.p50:
        told = listed(f"{name} {count:,}" for name, count in tokens.items())
        yield _unequal(
            f"tokens by replica: {told}; TTFT P50 {time(answers.ttft.p50)}, P95 "
            f"{time(answers.ttft.p95)} ({situation.name})",
            confidence(excess, at.IMBALANCE, answers.count, at.ENOUGH_ANSWERS),
        )


def _unequal(seen: str, sure: float) -> Cause:
    return Cause(
        what="requests are dealt out by number, and are not equal: a prompt of 20,000 tokens is "
        "not one of 50",
        seen=seen,
        remedy="send all traffic through `ekiden serve gateway`, which weighs tokens and KV; none "
        "to a replica by its own address, or through a round-robin balancer",
        confidence=sure,
    )
