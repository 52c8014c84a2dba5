"""What a deployment does under load: TTFT and TPOT at percentiles, or why it cannot keep up."""

from __future__ import annotations

import math

import msgspec

from ekiden.planner.batch import Batch, Split
from ekiden.planner.closed import room
from ekiden.planner.crowd import quantiles
from ekiden.planner.latency import Latency
from ekiden.planner.queueing import NORMAL, Queue, Service, poisson_quantile
from ekiden.planner.steady import GUESSED, TOO_MANY_PROMPTS, Mean, steady
from ekiden.planner.steps import Stepper
from ekiden.planner.workload import Objectives, Requests, Workload


def aggregated(stepper: Stepper, work: Workload, rate: float, replicas: int) -> Latency:
    """``replicas`` that do both, at ``rate`` requests a second together."""
    if not work.decodes:
        return _prompts_only(stepper, work, rate, replicas)
    groups = replicas * stepper.replica.layout.dp
    most = room(stepper, work.context)
    work = _with_cache(stepper, work, rate, replicas, most)
    mean = steady(stepper, work, rate / replicas, most, prompts=True)
    if isinstance(mean, str):
        return Latency(most=most, limit=mean)
    chunk = stepper.replica.resolved.chunk
    services = tuple(
        Service(
            share=kind.share / MOMENTS,
            busy=cost + work.fresh(kind) / chunk * mean.alone,
            latency=_first_token(stepper, work, kind)
            + (math.ceil(work.fresh(kind) / chunk) + (moment + 0.5) / MOMENTS) * mean.alone,
        )
        for kind, cost in zip(work.kinds, mean.costs, strict=True)
        for moment in range(MOMENTS)
    )
    queue = Queue(servers=groups, rate=rate, services=services)
    if queue.load >= 1:
        return Latency(most=most, prefill_load=mean.load, limit=TOO_MANY_PROMPTS)
    crowd = quantiles(stepper, work, rate / replicas, most, prompts=True)
    found = _latency(stepper, work, queue, mean, most, rate / groups, crowd)
    found = _later(found, _seats(work, mean, most, rate, replicas, (0.0,) * len(work.kinds)))
    tokens = max(work.fresh(kind) for kind in work.kinds)
    full = Batch(
        decode=mean.running / stepper.replica.layout.dp,
        context=work.context,
        prefill=min(chunk, tokens),
        seen=tokens / 2,
    )
    return msgspec.structs.replace(found, stall=stepper.mixed(full).total)


def _prompts_only(stepper: Stepper, work: Workload, rate: float, replicas: int) -> Latency:
    """Where every answer is the one token that its prompt gives: there is no TPOT, which stays 0,
    and nothing is decoded."""
    most, queue = room(stepper, work.context), first_tokens(stepper, work, rate, replicas)
    work = work.cached(replicas * stepper.tokens)
    if queue.load >= 1:
        return Latency(most=most, prefill_load=queue.load, limit=TOO_MANY_PROMPTS)
    p50, p95, p99 = (queue.quantile(q / 100) for q in NORMAL)
    none = {"tpot_p50": 0.0, "tpot_p95": 0.0, "tpot_p99": 0.0}
    found = Latency(ttft_p50=p50, ttft_p95=p95, ttft_p99=p99, most=most, prefill_load=queue.load)
    return msgspec.structs.replace(found, **none, prefill=_mean_prompt(stepper, work))


def _with_cache(
    stepper: Stepper, work: Workload, rate: float, replicas: int, most: float
) -> Workload:
    """With the prefixes that are found in the KV which running sequences leave. Equal prefixes go
    to equal replicas, so caches add up."""
    if not work.sharing:
        return work
    tokens = stepper.tokens
    half = work.cached(replicas * tokens / 2)
    guess = steady(stepper, half, rate / replicas, most, prompts=True, settled=GUESSED)
    used = tokens if isinstance(guess, str) else guess.running * work.context
    return work.cached(replicas * max(0.0, tokens - used))


MOMENTS = 4
"""At which a request may find the step that is running: decode steps ride along with its chunks."""


def first_tokens(prefill: Stepper, work: Workload, rate: float, replicas: int) -> Queue:
    """What prompts wait for in a pool that only computes them: the first token does not wait for
    KV to move."""
    work = work.cached(replicas * prefill.tokens)
    services = tuple(
        Service(
            share=kind.share,
            busy=prefill.busy(work.fresh(kind), kind.prompt - work.fresh(kind)),
            latency=_first_token(prefill, work, kind),
        )
        for kind in work.kinds
    )
    return Queue(servers=replicas * prefill.replica.layout.dp, rate=rate, services=services)


def in_time(queue: Queue, objectives: Objectives) -> bool:
    """Whether prompts keep the objectives of TTFT."""
    if queue.load >= 1:
        return False
    wanted = ((q, getattr(objectives, f"ttft_p{q}")) for q in NORMAL)
    return all(most is None or queue.quantile(q / 100) <= most for q, most in wanted)


def disaggregated(
    prefill: Stepper, decode: Stepper, work: Workload, rate: float, pools: tuple[int, int]
) -> Latency:
    """``pools``: replicas of prefill and of decode. The first token waits for room in the decode
    pool, which is kept for it before its prompt is computed, and not for KV to move; the second
    does, for what the last chunk leaves to be sent."""
    queue = first_tokens(prefill, work, rate, pools[0])
    work = work.cached(pools[0] * prefill.tokens)
    most = room(decode, work.context)
    if queue.load >= 1:
        return Latency(most=most, prefill_load=queue.load, limit="prefill: " + TOO_MANY_PROMPTS)
    mean = steady(decode, work, rate / pools[1], most, prompts=False)
    if isinstance(mean, str):
        return Latency(most=most, prefill_load=queue.load, limit=f"decode: {mean}")
    transfer, link_load = moved(prefill, decode, work, rate, pools)
    if link_load >= 1:
        return Latency(most=most, link_load=link_load, limit="the link cannot carry the KV in time")
    crowd = quantiles(decode, work, rate / pools[1], most, prompts=False)
    found = _latency(decode, work, queue, mean, most, 0.0, crowd)
    prompts = tuple(_first_token(prefill, work, kind) for kind in work.kinds)
    found = _later(found, _seats(work, mean, most, rate, pools[1], prompts))
    late = {f"tpot_p{q}": getattr(found, f"tpot_p{q}") + transfer / work.output for q in NORMAL}
    found = msgspec.structs.replace(found, **late)
    return msgspec.structs.replace(
        found,
        prefill_load=queue.load,
        transfer=transfer,
        link_load=link_load,
        prefill=_mean_prompt(prefill, work),
    )


def moved(
    prefill: Stepper, decode: Stepper, work: Workload, rate: float, pools: tuple[int, int]
) -> tuple[float, float]:
    """Seconds by which a mean prompt's last chunk is late, and the load of the busier pool's links.

    Each rank of the smaller replica has a link of its own.
    """
    ranks = min(prefill.replica.layout.gpus, decode.replica.layout.gpus)
    total = pools[0] * prefill.replica.layout.gpus + pools[1] * decode.replica.layout.gpus
    rate_of_link = decode.links.between(crosses_hosts=total > decode.devices.per_host)
    tokens = work.mean(map(work.fresh, work.kinds))
    size = sum(work_.kv.sequence_bytes(int(tokens)) for work_ in decode.works)
    size *= decode.replica.layout.tp
    last = min(tokens, prefill.chunk) / tokens
    seconds = size / (ranks * rate_of_link)
    fewer = min(pools[0] * prefill.replica.layout.gpus, pools[1] * decode.replica.layout.gpus)
    return seconds * last, rate * size / (fewer * rate_of_link)


def _tpot(
    stepper: Stepper, work: Workload, mean: Mean, batch: float, rate: float, percentile: int
) -> float:
    """Of the request that meets the larger ``batch`` and the more prompts of others."""
    alone = stepper.decode(max(1.0, batch), work.context).total
    met = poisson_quantile(rate * work.output * mean.tpot, percentile)
    return alone + met * work.mean(mean.costs) / work.output


def _first_token(stepper: Stepper, work: Workload, kind: Requests) -> float:
    fresh = work.fresh(kind)
    return stepper.told.request_s + stepper.prompt(fresh, kind.prompt - fresh).total


def _mean_prompt(stepper: Stepper, work: Workload) -> Split:
    tokens = work.mean(map(work.fresh, work.kinds))
    return stepper.prompt(tokens, work.prompt - tokens)


def _seats(
    work: Workload,
    mean: Mean,
    most: float,
    rate: float,
    replicas: int,
    before: tuple[float, ...],
) -> Queue:
    """For room in KV, which a request of each kind keeps ``before`` it is decoded, in seconds, and
    while it is."""
    services = tuple(
        Service(share=kind.share, busy=early + kind.output * mean.tpot, latency=0.0)
        for kind, early in zip(work.kinds, before, strict=True)
    )
    return Queue(servers=max(1, int(most * replicas)), rate=rate, services=services)


def _later(found: Latency, seats: Queue) -> Latency:
    """With the wait for room before the first token."""
    late = {f"ttft_p{q}": getattr(found, f"ttft_p{q}") + seats.quantile(q / 100) for q in NORMAL}
    return msgspec.structs.replace(found, **late)


def _latency(
    stepper: Stepper,
    work: Workload,
    queue: Queue,
    mean: Mean,
    most: float,
    rate: float,
    crowd: dict[int, float],
) -> Latency:
    """``rate`` of the prompts that a DP group computes beside decoding; ``crowd``: sequences by
    percentile."""
    ttft = [queue.quantile(q / 100) for q in NORMAL]
    tpot = [_tpot(stepper, work, mean, crowd[q], rate, q) for q in NORMAL]
    return Latency(
        ttft_p50=ttft[0],
        ttft_p95=ttft[1],
        ttft_p99=ttft[2],
        tpot_p50=tpot[0],
        tpot_p95=tpot[1],
        tpot_p99=tpot[2],
        running=mean.running,
        most=most,
        prefill_load=mean.load,
        decode=stepper.decode(max(1.0, mean.running), work.context),
        prefill=_mean_prompt(stepper, work),
    )
