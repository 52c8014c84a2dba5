"""How a model is split: R43, tensor parallelism that costs; R45, a pipeline that waits."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import DECODE, Evidence, Replica, Situation, same_lengths
from ekiden.doctor.finding import Cause, confidence
from ekiden.doctor.rules.words import listed, share, time


def slower_with_tp(evidence: Evidence) -> Iterator[Cause]:
    """R43."""
    for situation in evidence.situations:
        for replica in situation.busy:
            yield from _collectives_outweigh(situation, replica)
    for few, many in evidence.pairs():
        if 0 < few.tp < many.tp and few.load == many.load:
            yield from _slower(few, many)


def _collectives_outweigh(situation: Situation, replica: Replica) -> Iterator[Cause]:
    """Computing divides by TP at best, so a step that is mostly communication would be shorter on
    one device: that is arithmetic, and needs no second run."""
    if replica.tp < 2 or replica.pp > 1:
        return
    alone = replica.tp * (1 - replica.collective_share)
    if alone * at.SLOWER < 1:
        yield Cause(
            what=f"TP{replica.tp} of {replica.id} spends more in its collectives than it saves",
            seen=f"{share(replica.collective_share)} of a step in collectives: on one device it "
            f"would take at most {share(alone)} of the time ({situation.name})",
            remedy="if the model fits one device (`ekiden plan MODEL --gpu NAME` tells): replicas "
            "of -tp 1 (`ekiden serve`), or --decode-tp 1 and --prefill-tp 1 of `ekiden up`",
            confidence=confidence(
                1 / max(alone, 1e-3), at.SLOWER, replica.readings, at.ENOUGH_READINGS
            ),
        )


def _slower(few: Situation, many: Situation) -> Iterator[Cause]:
    one, other = few.answers, many.answers
    if not (one and other and same_lengths(one, other)):
        return
    times = {"TPOT": (one.tpot.p50, other.tpot.p50), "TTFT": (one.ttft.p50, other.ttft.p50)}
    worse = {n: b / a for n, (a, b) in times.items() if a and b > a * at.SLOWER}
    if worse and not any(b * at.SLOWER < a for a, b in times.values()):
        told = listed(f"{n} {time(times[n][0])} -> {time(times[n][1])}" for n in worse)
        shares = [replica.collective_share for replica in many.of(DECODE)]
        yield Cause(
            what=f"TP{many.tp} is slower than TP{few.tp}: a remedy for what does not fit, taken "
            "for traffic",
            seen=f"{told} at P50, {share(max(shares))} of a step in collectives ({few.name} "
            f"against {many.name})",
            remedy=f"-tp {few.tp} with more replicas (`ekiden serve decode -tp {few.tp}`, or "
            f"--decode N --decode-tp {few.tp} of `ekiden up`)",
            confidence=confidence(
                max(worse.values()), at.SLOWER, min(one.count, other.count), at.ENOUGH_ANSWERS
            ),
        )


def idle_stages(evidence: Evidence) -> Iterator[Cause]:
    """R45. With fewer requests than stages a pipeline cannot be full, whatever its stages are."""
    for situation in evidence.situations:
        for replica in situation.busy:
            stages = len(replica.stage_idle)
            if stages > 1 and replica.pending >= stages:
                yield from _uneven(situation, replica)
            if stages > 1 and replica.pending > stages:
                yield from _bubble(situation, replica)


def _uneven(situation: Situation, replica: Replica) -> Iterator[Cause]:
    idle = replica.stage_idle
    gap = max(idle) - min(idle)
    if gap > at.UNEVEN_STAGES:
        yield Cause(
            what=f"stage {idle.index(min(idle))} is the slowest, and the others wait for it",
            seen=_stages(situation, replica),
            remedy="a -pp that divides the layers, and ranks of the same speed; -tp "
            f"{replica.ranks} in place of -pp {replica.pp} where the link is fast",
            confidence=confidence(gap, at.UNEVEN_STAGES, replica.readings, at.ENOUGH_READINGS),
        )


def _bubble(situation: Situation, replica: Replica) -> Iterator[Cause]:
    idle = min(replica.stage_idle)
    if idle > at.BUBBLE:
        yield Cause(
            what="the bubble: too few steps are in flight to fill the stages",
            seen=_stages(situation, replica),
            remedy="smaller chunks make more of them (a lower --max-num-batched-tokens), leave out "
            f"--no-async-scheduling, or -tp {replica.ranks} in place of -pp {replica.pp}",
            confidence=confidence(idle, at.BUBBLE, replica.readings, at.ENOUGH_READINGS),
        )


def _stages(situation: Situation, replica: Replica) -> str:
    late = situation.answers.ttft.p99 if situation.answers else 0.0
    return (
        f"{replica.id} idles {listed(map(share, replica.stage_idle))} by stage with "
        f"{replica.pending:.1f} requests{f', TTFT P99 {time(late)}' if late else ''} "
        f"({situation.name})"
    )
