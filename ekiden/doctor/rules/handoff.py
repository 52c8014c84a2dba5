"""R55: prefill and decode apart, and slower for it."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import DECODE, PREFILL, Answers, Evidence, Situation, same_lengths
from ekiden.doctor.finding import Cause, confidence, weighed
from ekiden.doctor.rules.words import listed, size, time


def apart_and_slower(evidence: Evidence) -> Iterator[Cause]:
    for situation, answers in evidence.answered:
        if sum(answers.moved.values()):
            yield from _exposed(situation, answers)
        for model in situation.models:
            yield from _one_pool_waits(situation, model)
    for whole, apart in evidence.pairs():
        yield from _beaten(whole, apart)


def _exposed(situation: Situation, answers: Answers) -> Iterator[Cause]:
    """What a request waits for its KV is what the transfer could not hide."""
    parts = {n: answers.phases.get(n, 0.0) for n in ("prefill", "transfer", "first_decode")}
    exposed = parts["transfer"] / (sum(parts.values()) or 1.0)
    if parts["transfer"] <= at.EXPOSED_S or exposed <= at.EXPOSED_TRANSFER:
        return
    sure = confidence(exposed, at.EXPOSED_TRANSFER, answers.count, at.ENOUGH_ANSWERS)
    split = listed(f"{name} {time(value)}" for name, value in parts.items())
    short = answers.prompt_tokens < at.SHORT_PROMPT
    yield weighed(_slow_link(situation, answers, short), sure, f"a mean of {split}", situation)
    if short:
        yield weighed(_short_prompts(answers), sure, f"a mean of {split}", situation)


def _slow_link(situation: Situation, answers: Answers, short: bool) -> Cause:
    return Cause(
        what="the link: KV arrives later than it is computed",
        seen=_links(situation, answers),
        remedy="a faster wire (`ekiden doctor --preflight` prints what each did), a higher "
        "--kv-rate-limit or none, both pools on one host, --kv-cache-dtype int8; or do not split",
        # Short prompts move little: on any link it is the passage itself that costs.
        confidence=0.6 if short else 1.0,
    )


def _short_prompts(answers: Answers) -> Cause:
    return Cause(
        what="the prompts are short: handing them over costs more than computing them",
        seen=f"{answers.prompt_tokens:.0f} tokens a prompt",
        remedy=f"--local-prefill-tokens {_rounded(answers.prompt_tokens)} on decode, or no prefill "
        "pool at all: a decode pool alone is a whole server",
        confidence=1.0,
    )


def _rounded(tokens: float) -> int:
    """The next multiple of 64 that covers so many."""
    return 64 * (int(tokens) // 64 + 1)


def _links(situation: Situation, answers: Answers) -> str:
    told = [
        f"{size(count / max(answers.count, 1))} an answer over {wire}"
        for wire, count in answers.moved.items()
    ]
    measured = [
        f"{wire.wire} from {wire.peer} did {size(wire.bytes_per_s)}/s"
        for replica in situation.replicas
        for wire in replica.wires
    ]
    return listed(told + measured)


def _one_pool_waits(situation: Situation, model: str) -> Iterator[Cause]:
    """A pool that queues beside one that does not: the ratio is wrong."""
    pools = {
        role: [replica for replica in situation.of(role, model) if not replica.lost]
        for role in (PREFILL, DECODE)
    }
    for short, long in ((PREFILL, DECODE), (DECODE, PREFILL)):
        if not (pools[short] and pools[long]):
            return
        has, of_other = len(pools[short]), len(pools[long])
        queued, beside = (sum(r.waiting for r in pools[role]) for role in (short, long))
        if queued > at.QUEUED * has and beside < 0.5 * of_other:
            sure = confidence(queued / has, at.QUEUED, _readings(situation), at.ENOUGH_READINGS)
            yield Cause(
                what=f"the ratio of the pools: {short} has too few replicas for {long}",
                seen=f"{queued:.1f} requests wait for {has} {short} replica{'s' * (has > 1)}, "
                f"{beside:.1f} for {of_other} of {long} ({situation.name})",
                remedy=f"one more {short} replica (`ekiden serve {short}`, or --{short} {has + 1} "
                "of `ekiden up`); `ekiden plan` computes the ratio",
                # A queue alone may be a moment's burst.
                confidence=round(0.8 * sure, 2),
            )


def _readings(situation: Situation) -> int:
    return max(replica.readings for replica in situation.replicas)


def _beaten(whole: Situation, apart: Situation) -> Iterator[Cause]:
    """The same load, once with a prefill pool and once without."""
    one, other = whole.answers, apart.answers
    if not (one and other and whole.load == apart.load and other.moved and not one.moved):
        return
    times = {
        "TTFT": (one.ttft.p50, other.ttft.p50),
        "TPOT": (one.tpot.p50, other.tpot.p50),
        "a whole answer": (_answer_s(one), _answer_s(other)),
    }
    before, after = times["a whole answer"]
    if before and same_lengths(one, other) and after > at.SLOWER * before:
        sure = confidence(after / before, at.SLOWER, min(one.count, other.count), at.ENOUGH_ANSWERS)
        # Where one of the two times is better it may be what the split is for.
        traded = any(b * at.SLOWER < a for a, b in times.values())
        told = listed(f"{name} {time(a)} -> {time(b)}" for name, (a, b) in times.items())
        yield Cause(
            what="splitting does not pay for this load",
            seen=f"{told} at P50 ({whole.name} against {apart.name})",
            remedy="no prefill pool: --prefill 0 of `ekiden up`, its replicas started as "
            "`ekiden serve decode`",
            confidence=round(sure * (0.6 if traded else 1.0), 2),
        )


def _answer_s(answers: Answers) -> float:
    return answers.ttft.p50 + answers.tpot.p50 * max(answers.output_tokens - 1, 0)
