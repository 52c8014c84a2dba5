"""R44: TPOT is high, or differs from answer to answer."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import DECODE, Answers, Evidence, Replica, Situation
from ekiden.doctor.finding import Cause, confidence, weighed
from ekiden.doctor.rules.crowd import crowded
from ekiden.doctor.rules.words import share, time


def slow_tokens(evidence: Evidence) -> Iterator[Cause]:
    for situation, answers in evidence.answered:
        tpot, goal = answers.tpot, evidence.objectives.tpot_s
        jitter = tpot.p95 / tpot.p50 if tpot.p50 else 0.0
        if goal and tpot.p95 > goal:
            sure = confidence(tpot.p95, goal, tpot.count, at.ENOUGH_ANSWERS)
            told = f" over the objective of {time(goal)}"
        elif tpot.p95 - tpot.p50 > at.FELT_S and jitter > at.JITTER:
            sure, told = confidence(jitter, at.JITTER, tpot.count, at.ENOUGH_ANSWERS), ""
        else:
            continue
        seen = f"TPOT P50 {time(tpot.p50)}, P95 {time(tpot.p95)}{told}"
        for cause in _causes(evidence, situation, answers):
            yield weighed(cause, sure, seen, situation)


def _causes(evidence: Evidence, situation: Situation, answers: Answers) -> list[Cause]:
    """Those for which there is evidence; without any, what is left."""
    decode = [replica for replica in situation.busy if replica.role == DECODE]
    found = [
        *map(_communication, decode),
        _full(situation, answers, decode),
        _prefill_between(answers),
    ]
    if crowd := crowded(evidence.host):
        found.append(weighed(crowd, 0.7))
    return [cause for cause in found if cause is not None] or [_bandwidth(decode)]


def _communication(replica: Replica) -> Cause | None:
    if replica.collective_share <= at.COMMUNICATION:
        return None
    return Cause(
        what=f"communication between the ranks of {replica.id}",
        seen=f"{share(replica.collective_share)} of a step in collectives",
        remedy="a lower -tp with more replicas, or a faster link between the ranks",
        confidence=1.0,
    )


def _full(situation: Situation, answers: Answers, decode: list[Replica]) -> Cause | None:
    preempted = answers.fallbacks.get("preempted", 0)
    peak = max((replica.kv_peak for replica in decode), default=0.0)
    if not preempted and not any(map(situation.full, decode)):
        return None
    return Cause(
        what="KV runs out, and answers are put back and computed again",
        seen=f"{preempted} preempted, KV {share(peak)} full at its peak",
        remedy="a larger --kv-cache-memory, --kv-cache-dtype int8, or a lower --max-num-seqs",
        confidence=0.9,
    )


def _prefill_between(answers: Answers) -> Cause | None:
    if answers.local_share <= 0.5:
        return None
    return Cause(
        what="prompts are prefilled in the steps that answers wait for",
        seen=f"{share(answers.local_share)} of the computed prompt tokens were computed on decode, "
        f"{answers.prompt_tokens:.0f} tokens a prompt",
        remedy="a lower --max-num-batched-tokens, or a prefill pool (`ekiden serve prefill`) where "
        "`ekiden plan` says that it pays",
        confidence=0.8,
    )


def _bandwidth(decode: list[Replica]) -> Cause:
    steps = [replica.step_s for replica in decode if replica.step_s]
    told = f"a decode step takes {time(max(steps))}" if steps else "no replica tells its steps"
    return Cause(
        what="memory bandwidth: each step reads the weights, and the KV of all its sequences",
        seen=f"{told}, and nothing else stands out",
        remedy="-q int8 or --kv-cache-dtype int8, more replicas, or a higher -tp within a host",
        confidence=0.4,
    )
