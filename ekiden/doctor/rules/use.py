"""How devices are used: idle while requests wait (R51), busy with something else (R52)."""

from __future__ import annotations

from collections.abc import Iterator

from ekiden.doctor import thresholds as at
from ekiden.doctor.evidence import DECODE, Evidence, Replica, Situation
from ekiden.doctor.finding import Cause, confidence, weighed
from ekiden.doctor.rules.crowd import crowded
from ekiden.doctor.rules.words import share, time


def starved(evidence: Evidence) -> Iterator[Cause]:
    """R51."""
    for situation in evidence.situations:
        yield from _slow_client(situation)
        yield from _in_the_gateway(situation)
        for replica in situation.busy:
            yield from _small_batch(situation, replica)
            yield from _between_steps(situation, replica)


def _slow_client(situation: Situation) -> Iterator[Cause]:
    client = situation.client
    if client is None or not (situation.answers and situation.answers.count):
        return
    excess = max(client.cpu_share / at.CLIENT_CPU, client.lag_p99_s / at.CLIENT_LAG_S)
    if excess > 1:
        yield Cause(
            what="the load itself is the limit: its process had no more to give",
            seen=f"{share(client.cpu_share)} of a core, requests sent {time(client.lag_p99_s)} "
            f"late at P99 ({situation.name})",
            remedy="measure again with `ekiden bench --processes 4`, from another machine",
            confidence=confidence(excess, 1.0, 1, 1),
        )


def _in_the_gateway(situation: Situation) -> Iterator[Cause]:
    known = situation.known
    here = situation.in_flight or 0.0
    lacking = (here - known) / here if here else 0.0
    readings = max((replica.readings for replica in situation.replicas), default=0)
    if here >= 4 and lacking > at.STARVED and readings:
        yield Cause(
            what="requests stand in the gateway: templates, tokenising or the network",
            seen=f"{here:.1f} requests in flight, of which the replicas have {known:.1f} "
            f"({situation.name})",
            remedy="a second gateway (`ekiden serve gateway`), since it holds no state, and more "
            "cores for it, since tokenising takes them",
            confidence=confidence(lacking, at.STARVED, readings, at.ENOUGH_READINGS),
        )


def _small_batch(situation: Situation, replica: Replica) -> Iterator[Cause]:
    cap = replica.max_num_seqs
    capped = replica.role == DECODE and 0 < cap <= at.SMALL_BATCH and replica.running >= 0.8 * cap
    if capped and replica.waiting >= 1 and not situation.full(replica):
        yield Cause(
            what="the batch is capped while requests wait and there is room for them",
            seen=f"{replica.id} runs {replica.running:.1f} of at most {cap}, "
            f"{replica.waiting:.1f} wait, KV {share(replica.kv_share)} ({situation.name})",
            remedy=f"a larger --max-num-seqs (now {cap})",
            confidence=confidence(
                1 + replica.waiting / cap, 1.0, replica.readings, at.ENOUGH_READINGS
            ),
        )


def _between_steps(situation: Situation, replica: Replica) -> Iterator[Cause]:
    if len(replica.stage_idle) != 1 or replica.waiting < 1 or situation.full(replica):
        return
    (idle,) = replica.stage_idle
    if idle > at.STARVED:
        yield Cause(
            what="the device waits between steps: planning, Python and the processors of the host",
            seen=f"{replica.id} computes {share(1 - idle)} of the time with "
            f"{replica.waiting:.1f} requests waiting ({situation.name})",
            remedy="leave out --no-async-scheduling, a larger --max-num-batched-tokens, and cores "
            "for the service beside its ranks (--threads-per-rank)",
            confidence=confidence(idle, at.STARVED, replica.readings, at.ENOUGH_READINGS),
        )


def busy_without_result(evidence: Evidence) -> Iterator[Cause]:
    """R52."""
    for situation in evidence.situations:
        for replica in situation.busy:
            idle = min(replica.stage_idle, default=1.0)
            if 1 - idle >= at.BUSY and replica.waiting >= 1:
                yield from _spent_on(evidence, situation, replica)


def _spent_on(evidence: Evidence, situation: Situation, replica: Replica) -> Iterator[Cause]:
    seen = f"{replica.id} is busy and {replica.waiting:.1f} requests wait"
    if replica.collective_share > at.COMMUNICATION:
        yield Cause(
            what="the ranks communicate more than they should",
            seen=f"{seen}; {share(replica.collective_share)} of a step in collectives and stage "
            f"links ({situation.name})",
            remedy=f"replicas with a lower -tp than {replica.tp}, or a faster link",
            confidence=confidence(
                replica.collective_share, at.COMMUNICATION, replica.readings, at.ENOUGH_READINGS
            ),
        )
    if (crowd := crowded(evidence.host)) and evidence.host:
        crowding = evidence.host.load / evidence.host.cores
        sure = confidence(crowding, at.CROWDED, replica.readings, at.ENOUGH_READINGS)
        yield weighed(crowd, sure, seen, situation)
