"""What a deployment does under load: TTFT and TPOT at percentiles, or why it cannot keep up."""

from __future__ import annotations

import math

import msgspec

from ekiden.planner.closed import room
from ekiden.planner.queueing import NORMAL, Queue, Service, poisson_quantile
from ekiden.planner.steps import Batch, Split, Stepper
from ekiden.planner.workload import Objectives, Requests, Workload

ROUNDS = 30
"""Of the fixed point of batch and time of a token."""
SETTLED = 1e-3
"""Relative change at which it is taken as found."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Percentiles over requests; infinite where the deployment cannot keep up."""

    ttft_p50: float = math.inf
    ttft_p95: float = math.inf
    ttft_p99: float = math.inf
    tpot_p50: float = math.inf
    tpot_p95: float = math.inf
    tpot_p99: float = math.inf
    running: float = 0.0
    """Sequences decoded at once on a replica (of the decode pool), on average."""
    most: float = 0.0
    """For which it has room."""
    prefill_load: float = 0.0
    """Share of the time for which prompts are computed."""
    stall: float = 0.0
    """Longest gap between two tokens that a prompt causes: one full chunk."""
    transfer: float = 0.0
    """Seconds for which the second token waits for KV to move."""
    link_load: float = 0.0
    """Share of the link between the pools that KV takes."""
    decode: Split = Split()
    """One decode step of the mean batch."""
    prefill: Split = Split()
    """One mean prompt."""
    limit: str = ""
    """What it cannot keep up with; empty where it can."""

    def missed(self, objectives: Objectives) -> dict[str, float]:
        """Objectives that are not met, with how many times over they are."""
        over = {name: getattr(self, name) / most for name, most in objectives.stated().items()}
        return {name: times for name, times in over.items() if times > 1}


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed point of decoding."""

    running: float
    alone: float
    """Seconds of a decode step without prompts."""
    tpot: float


def aggregated(stepper: Stepper, work: Workload, rate: float, replicas: int) -> Latency:
    """``replicas`` that do both, at ``rate`` requests a second together."""
    groups = replicas * stepper.replica.layout.dp
    pieces = [(kind, prompt_cost(stepper, work, kind)) for kind in work.kinds]
    load = rate / groups * sum(kind.share * cost for kind, cost in pieces)
    most = room(stepper, work.context)
    if load >= 1:
        return Latency(limit="computing the prompts alone takes more than all of its time")
    mean = steady(stepper, work, rate / replicas, most, load)
    if mean is None:
        return Latency(most=most, prefill_load=load, limit=_full(most))
    chunk = stepper.replica.resolved.chunk
    services = tuple(
        Service(
            share=kind.share,
            busy=cost + work.fresh(kind) / chunk * mean.alone,
            latency=_first_token(stepper, work, kind) + _steps(stepper, work, kind) * mean.alone,
        )
        for kind, cost in pieces
    )
    queue = Queue(servers=groups, rate=rate, services=services)
    if queue.load >= 1:
        return Latency(most=most, prefill_load=load, limit="prompts come faster than they go")
    mean_cost = sum(kind.share * cost for kind, cost in pieces)
    tpots = {
        f"tpot_p{q}": _tpot(stepper, work, mean, most, rate / groups, mean_cost, q) for q in NORMAL
    }
    return _latency(stepper, work, queue, tpots, mean, most, load)


def disaggregated(
    prefill: Stepper, decode: Stepper, work: Workload, rate: float, pools: tuple[int, int]
) -> Latency:
    """``pools``: replicas of prefill and of decode. The first token does not wait for KV to move,
    the second does, for what the last chunk leaves to be sent."""
    groups = pools[0] * prefill.replica.layout.dp
    services = tuple(
        Service(
            share=kind.share,
            busy=prompt_cost(prefill, work, kind),
            latency=_first_token(prefill, work, kind),
        )
        for kind in work.kinds
    )
    queue = Queue(servers=groups, rate=rate, services=services)
    most = room(decode, work.context)
    if queue.load >= 1:
        return Latency(most=most, limit="prefill cannot keep up")
    mean = steady(decode, work, rate / pools[1], most, 0.0)
    if mean is None:
        return Latency(most=most, prefill_load=queue.load, limit=_full(most))
    transfer, link_load = moved(prefill, decode, work, rate, pools)
    if link_load >= 1:
        return Latency(most=most, link_load=link_load, limit="the link cannot carry the KV in time")
    tpots = {
        f"tpot_p{q}": _tpot(decode, work, mean, most, 0.0, 0.0, q) + transfer / work.output
        for q in NORMAL
    }
    found = _latency(prefill, work, queue, tpots, mean, most, queue.load)
    return msgspec.structs.replace(
        found,
        stall=0.0,
        transfer=transfer,
        link_load=link_load,
        decode=decode.decode(mean.running, work.context),
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
    tokens = sum(kind.share * work.fresh(kind) for kind in work.kinds)
    size = sum(work_.kv.sequence_bytes(int(tokens)) for work_ in decode.works)
    size *= decode.replica.layout.tp
    last = min(tokens, prefill.replica.resolved.chunk) / tokens
    seconds = size / (ranks * rate_of_link)
    fewer = min(pools[0] * prefill.replica.layout.gpus, pools[1] * decode.replica.layout.gpus)
    return seconds * last, rate * size / (fewer * rate_of_link)


def prompt_cost(stepper: Stepper, work: Workload, kind: Requests) -> float:
    """Seconds that a prompt adds to the steps that run anyway."""
    fresh = work.fresh(kind)
    spent = stepper.prompt(fresh, kind.prompt - fresh)
    if stepper.replica.layout.pp > 1:
        return stepper.occupied(fresh, kind.prompt - fresh)
    return spent.total - spent.overhead


def steady(stepper: Stepper, work: Workload, rate: float, most: float, load: float) -> Mean | None:
    """Batch and time of a token follow from one another; None: there is no room for the batch.

    ``rate`` of one replica; ``load``: share of its time that prompts take.
    """
    running = 1.0
    for _ in range(ROUNDS):
        alone = stepper.decode(max(running, 1.0), work.context).total
        tpot = alone / (1 - load)
        wanted = rate * work.output * tpot
        if wanted > most:
            return None
        if abs(wanted - running) <= SETTLED * running:
            break
        running = wanted
    return Mean(running=wanted, alone=alone, tpot=tpot)


def _tpot(
    stepper: Stepper,
    work: Workload,
    mean: Mean,
    most: float,
    rate: float,
    cost: float,
    percentile: int,
) -> float:
    """Of the request that meets the larger batch and the more prompts of others."""
    batch = min(most, max(1.0, poisson_quantile(mean.running, percentile)))
    alone = stepper.decode(batch, work.context).total
    met = poisson_quantile(rate * work.output * mean.tpot, percentile)
    return alone + met * cost / work.output


def _first_token(stepper: Stepper, work: Workload, kind: Requests) -> float:
    fresh = work.fresh(kind)
    return stepper.told.request_s + stepper.prompt(fresh, kind.prompt - fresh).total


def _steps(stepper: Stepper, work: Workload, kind: Requests) -> float:
    """Decode steps that ride along, and half of the one that a request finds running."""
    return math.ceil(work.fresh(kind) / stepper.replica.resolved.chunk) + 0.5


def _latency(
    stepper: Stepper,
    work: Workload,
    queue: Queue,
    tpots: dict[str, float],
    mean: Mean,
    most: float,
    load: float,
) -> Latency:
    tokens = sum(kind.share * work.fresh(kind) for kind in work.kinds)
    chunk = min(stepper.replica.resolved.chunk, max(work.fresh(kind) for kind in work.kinds))
    full = Batch(decode=mean.running, context=work.context, prefill=chunk, seen=chunk / 2)
    return Latency(
        **{f"ttft_p{q}": queue.quantile(q / 100) for q in NORMAL},
        **tpots,
        running=mean.running,
        most=most,
        prefill_load=load,
        stall=stepper.mixed(full).total,
        decode=stepper.decode(max(1.0, mean.running), work.context),
        prefill=stepper.prompt(tokens, work.prompt - tokens),
    )


def _full(most: float) -> str:
    return f"KV and --max-num-seqs have room for {most:.0f} sequences at once, and more are wanted"
