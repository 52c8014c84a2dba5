"""R47: short prompts are served, and long ones find no room."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import Answers, Evidence, Replica, Situation
from ekiden.doctor.finding import Cause, confidence
from ekiden.doctor.rules.words import share


def full_cache(evidence: Evidence) -> Iterator[Cause]:
    for situation in evidence.situations:
        for replica in situation.replicas:
            yield from _full(situation, replica)
        if situation.answers is not None:
            yield from _put_back(situation, situation.answers)
            yield from _refused(situation, situation.answers)


def _full(situation: Situation, replica: Replica) -> Iterator[Cause]:
    if situation.full(replica) and replica.waiting >= 0.5:
        yield _no_room(
            f"{replica.id} had its KV{_of(replica)} {share(replica.kv_peak)} full at its peak and "
            f"{replica.waiting:.1f} requests waiting{_asked(situation)} ({situation.name})",
            confidence(1 + replica.waiting, 1.0, replica.readings, at.ENOUGH_READINGS),
        )


def _of(replica: Replica) -> str:
    return f" of {replica.kv_tokens:,} tokens" if replica.kv_tokens else ""


def _asked(situation: Situation) -> str:
    asked = situation.answers.prompt_tokens if situation.answers else 0.0
    return f", {asked:.0f} tokens a prompt" if asked else ""


def _put_back(situation: Situation, answers: Answers) -> Iterator[Cause]:
    if preempted := answers.fallbacks.get("preempted", 0):
        part = preempted / max(answers.count, 1)
        yield _no_room(
            f"{preempted} of {answers.count} answers were put back for want of KV blocks "
            f"({situation.name})",
            confidence(1 + part, 1.0, answers.count, at.ENOUGH_ANSWERS),
        )


def _refused(situation: Situation, answers: Answers) -> Iterator[Cause]:
    for kind, detail in answers.error_details.items():
        if "KV" in detail:
            count = answers.errors.get(kind, 1)
            yield _no_room(
                f"{count} requests were refused: {detail} ({situation.name})",
                confidence(2.0, 1.0, count, 1),
            )


def _no_room(seen: str, sure: float) -> Cause:
    return Cause(
        what="the KV cache is smaller than what the requests hold: KV and activations grow with "
        "the prompt, weights do not",
        seen=seen,
        remedy="lower --max-model-len, --max-num-batched-tokens or the concurrency "
        "(--max-num-seqs); or more room: --kv-cache-memory, --kv-cache-dtype int8, -q int8, -tp 2",
        confidence=sure,
    )
