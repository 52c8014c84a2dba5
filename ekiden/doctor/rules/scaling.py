"""R48: more replicas, and not that much more throughput; or a link that is full."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import DECODE, Answers, Evidence, Situation, same_lengths
from ekiden.doctor.finding import Cause, confidence, weighed
from ekiden.doctor.rules.words import size


def does_not_scale(evidence: Evidence) -> Iterator[Cause]:
    for few, many in evidence.pairs():
        if _as_hard(few, many):
            yield from _poor(evidence, few, many)
    for situation in evidence.situations:
        if situation.answers is not None and situation.seconds > 0:
            yield from _full_wires(situation, situation.answers)


def _as_hard(few: Situation, many: Situation) -> bool:
    """Whether there are more replicas in ``many``, and each is asked for as much as each of
    ``few``: by a closed loop, whose throughput is what the server gives."""
    one, other = few.load, many.load
    before, after = len(few.of(DECODE)), len(many.of(DECODE))
    if not 0 < before < after or one is None or other is None:
        return False
    closed = one.kind == other.kind == "concurrency"
    return closed and other.value / after >= 0.9 * one.value / before


def _poor(evidence: Evidence, few: Situation, many: Situation) -> Iterator[Cause]:
    one, other = few.answers, many.answers
    if not (one and other and same_lengths(one, other) and one.tokens_per_s):
        return
    before, after = len(few.of(DECODE)), len(many.of(DECODE))
    gained, promised = other.tokens_per_s / one.tokens_per_s, after / before
    if not 0 < gained < at.SCALING * promised:
        return
    sure = confidence(
        at.SCALING * promised / gained, 1.0, min(one.count, other.count), at.ENOUGH_ANSWERS
    )
    seen = (
        f"{after} decode replicas in place of {before} give {gained:.2f} times the tokens/s "
        f"({few.name} against {many.name})"
    )
    for cause in _limits(evidence):
        yield weighed(cause, sure, seen)


def _limits(evidence: Evidence) -> Iterator[Cause]:
    """What replicas of one machine share, and what those of several do; both where nobody tells."""
    hosts = {replica.host for one in evidence.situations for replica in one.replicas} - {""}
    if len(hosts) < 2:
        yield Cause(
            what="the replicas share what one machine has: cores, memory bandwidth, its network",
            seen=f"{evidence.host.cores} cores here" if evidence.host else "",
            remedy="replicas on machines of their own, each whole on its machine "
            "(`ekiden serve decode --host 0.0.0.0`), or fewer of them",
            confidence=1.0 if hosts else 0.6,
        )
    if len(hosts) != 1:
        yield Cause(
            what="the link between the machines is the limit",
            seen=f"{len(hosts)} machines" if hosts else "",
            remedy="the replicas of both pools that hand over to one another on one machine, a "
            "faster link, or --kv-cache-dtype int8, which moves less",
            confidence=1.0 if hosts else 0.5,
        )


def _full_wires(situation: Situation, answers: Answers) -> Iterator[Cause]:
    measured = [wire for replica in situation.replicas for wire in replica.wires]
    for wire, moved in answers.moved.items():
        limit = sum(one.bytes_per_s for one in measured if one.wire == wire)
        rate = moved / situation.seconds
        if limit and rate > at.WIRE_USE * limit:
            yield Cause(
                what=f"KV fills the wire {wire}",
                seen=f"{size(rate)}/s moved over what did {size(limit)}/s when it was measured "
                f"alone ({situation.name})",
                remedy="prefill and decode on one host (shm), a faster link, --kv-cache-dtype "
                "int8, or a higher --local-prefill-tokens for the shorter prompts",
                confidence=confidence(rate / limit, at.WIRE_USE, answers.count, at.ENOUGH_ANSWERS),
            )
