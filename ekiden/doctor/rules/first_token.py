"""R53: TTFT is high, and which part of it is."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import DECODE, PREFILL, Answers, Evidence, Situation
from ekiden.doctor.finding import Cause, confidence, weighed
from ekiden.doctor.rules.words import share, time

TOLD = 0.25
"""A part of TTFT that is smaller is no cause, unless it is the largest."""


def late_first_token(evidence: Evidence) -> Iterator[Cause]:
    yield from filter(None, map(_stuck, evidence.situations))
    for situation, answers in evidence.answered:
        goal, ttft = evidence.objectives.ttft_s, answers.ttft
        missed = bool(goal) and ttft.p95 > goal
        queue, prefill = _phases(answers)
        if not missed and (queue <= at.QUEUE_S or queue <= at.QUEUE_SHARE * (queue + prefill)):
            continue
        excess = ttft.p95 / goal if missed else queue / at.QUEUE_S
        sure = confidence(excess, 1.0, answers.count, at.ENOUGH_ANSWERS)
        seen = (
            f"TTFT P50 {time(ttft.p50)}, P95 {time(ttft.p95)}; a mean of {time(queue)} queued and "
            f"{time(prefill)} in prefill"
        )
        parts = list(_parts(situation, answers))
        largest = max(cause.confidence for cause in parts)
        for cause in parts:
            if cause.confidence > TOLD or cause.confidence == largest:
                yield weighed(cause, sure, seen, situation)


def _stuck(situation: Situation) -> Cause | None:
    """Requests that nobody answered leave no times behind."""
    here, answers = situation.in_flight or 0.0, situation.answers
    ended = answers is None or answers.count or answers.errors
    if ended or here < 0.5 or situation.seconds < at.STUCK_S:
        return None
    known = situation.known
    return Cause(
        what="requests are in flight, and none was answered",
        seen=f"{here:.1f} in flight, of which the replicas have {known:.1f} ({situation.name})",
        remedy="watch for longer (--watch 60) where answers are long; else read what decode "
        "replicas last logged: a wire between two replicas is measured when they first meet",
        confidence=confidence(situation.seconds, at.STUCK_S, here, 1),
    )


def _phases(answers: Answers) -> tuple[float, float]:
    return answers.phases.get("queue", 0.0), answers.phases.get("prefill", 0.0)


def _parts(situation: Situation, answers: Answers) -> Iterator[Cause]:
    """A cause for each part of TTFT; its confidence is its share of the whole."""
    queue, prefill = _phases(answers)
    whole = max(queue + prefill, answers.ttft.mean) or 1.0
    yield _queue(situation, answers, queue / whole)
    yield Cause(
        what="prompts are long for what computes them",
        seen=f"{answers.prompt_tokens:.0f} tokens a prompt, {_speed(situation)}",
        remedy="a higher --max-num-batched-tokens, a higher -tp of the pool that prefills within a "
        "host, and prefix caching for prompts that begin alike",
        confidence=prefill / whole,
    )
    yield Cause(
        what="time goes by before a replica has the request: templates and tokenising in the "
        "gateway, or the network",
        seen=f"{share(1 - (queue + prefill) / whole)} of it is neither queue nor prefill",
        remedy="a second gateway (`ekiden serve gateway`) and cores for it",
        confidence=max(0.0, 1 - (queue + prefill) / whole),
    )
    yield from _lost_prefixes(answers)
    yield from _waiting_ranks(situation, prefill / whole)


def _queue(situation: Situation, answers: Answers, part: float) -> Cause:
    """For room in a cache, where that is what is full; else for the steps of a pool."""
    pool = _queueing_pool(situation, answers)
    if any(map(situation.full, situation.of(pool))):
        what = f"requests queue for room in the KV of {pool}"
        first = "a larger --kv-cache-memory or --kv-cache-dtype int8, or one more"
    else:
        what, first = f"requests queue for {pool}: it is asked for more than it can do", "one more"
    return Cause(
        what=what,
        seen=f"{share(part)} of it is queue",
        remedy=f"{first} {pool} replica (`ekiden serve {pool}`); `ekiden plan` computes how many",
        confidence=part,
    )


def _lost_prefixes(answers: Answers) -> Iterator[Cause]:
    total = sum(answers.sources.values())
    if answers.predicted_cached is None or not total:
        return
    missed = answers.predicted_cached / total - answers.cached_share
    if missed > at.PREFIX_MISS:
        yield Cause(
            what="prompts are routed to where their prefix is no longer cached",
            seen=f"{share(missed)} of the prompt tokens were expected in a cache and computed",
            remedy="a larger --kv-cache-memory on the replicas that evict, and no "
            "--no-enable-prefix-caching",
            confidence=min(1.0, missed),
        )


def _waiting_ranks(situation: Situation, prefill: float) -> Iterator[Cause]:
    slow = max((one.collective_share for one in situation.of(PREFILL)), default=0.0)
    if slow > at.COMMUNICATION:
        yield Cause(
            what="the ranks of prefill wait for one another",
            seen=f"{share(slow)} of a step in collectives",
            remedy="a lower -tp on the prefill pool, with more replicas",
            confidence=slow * prefill,
        )


def _queueing_pool(situation: Situation, answers: Answers) -> str:
    """Where most wait; where nobody tells, where prompts are computed."""
    waiting = {role: sum(r.waiting for r in situation.of(role)) for role in (PREFILL, DECODE)}
    if any(waiting.values()):
        return max(waiting, key=lambda role: waiting[role])
    return DECODE if answers.local_share > 0.5 else PREFILL


def _speed(situation: Situation) -> str:
    speeds = [r.prefill_tokens_per_s for r in situation.replicas if r.prefill_tokens_per_s]
    return f"{max(speeds):,.0f} tokens/s" if speeds else "at a speed that nobody tells"
