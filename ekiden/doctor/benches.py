"""From the result of ``ekiden bench`` to situations, one a level.

The structs have what is read here of a result, by its own field names: another room writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ekiden.doctor.evidence import Answers, Client, Load, Replica, Situation, Times
from ekiden.measures.spread import Spread


class Share(msgspec.Struct, frozen=True):
    role: str
    replica: str
    tokens: int
    tp: int = 0
    pp: int = 0


class Service(msgspec.Struct, frozen=True):
    prompt_sources: dict[str, int]
    phases_ms: dict[str, Spread]
    replicas: list[Share]
    fallbacks: dict[str, int]
    wires: dict[str, int]
    gauges: dict[str, dict[str, Spread]]


class Level(msgspec.Struct, frozen=True):
    name: str
    load: str
    value: float | None
    succeeded: int
    errors: dict[str, int]
    error_details: dict[str, str]
    duration_s: float
    output_tokens_per_s: float
    ttft_from_send_ms: Spread
    tpot_ms: Spread
    schedule_lag_ms: Spread
    prompt_tokens: Spread
    output_tokens: Spread
    client_cpu_share: float
    service: Service | None


class Run(msgspec.Struct, frozen=True):
    levels: list[Level]


def situations(name: str, run: Run) -> Iterator[Situation]:
    """``name``: what the operator calls the run."""
    for level in run.levels:
        service = level.service
        yield Situation(
            name=f"{name}, {level.name}",
            seconds=level.duration_s,
            answers=_answers(level),
            replicas=tuple(_replicas(service)) if service else (),
            in_flight=_gauge(service, "requests in flight", "").mean if service else None,
            client=Client(
                cpu_share=level.client_cpu_share, lag_p99_s=level.schedule_lag_ms.p99 / 1000
            ),
            load=Load(kind=level.load, value=math.inf if level.value is None else level.value),
        )


def _answers(level: Level) -> Answers:
    service = level.service
    told = Answers(
        count=level.succeeded,
        errors=level.errors,
        error_details=level.error_details,
        tokens_per_s=level.output_tokens_per_s,
        ttft=times(level.ttft_from_send_ms),
        tpot=times(level.tpot_ms),
        prompt_tokens=level.prompt_tokens.mean,
        output_tokens=level.output_tokens.mean,
    )
    if service is None:
        return told
    shares: dict[str, dict[str, int]] = {}
    for share in service.replicas:
        shares.setdefault(share.role, {})[share.replica] = share.tokens
    return msgspec.structs.replace(
        told,
        phases={phase: spread.mean / 1000 for phase, spread in service.phases_ms.items()},
        sources=dict(service.prompt_sources),
        fallbacks=service.fallbacks,
        moved=dict(service.wires),
        shares=shares,
    )


def times(spread: Spread) -> Times:
    """Of milliseconds."""
    return Times(
        count=spread.count,
        mean=spread.mean / 1000,
        p50=spread.p50 / 1000,
        p95=spread.p95 / 1000,
        p99=spread.p99 / 1000,
    )


def _replicas(service: Service) -> Iterator[Replica]:
    for share in service.replicas:
        running = _gauge(service, "requests running", share.replica)
        kv = _gauge(service, "KV in use", share.replica)
        yield Replica(
            id=share.replica,
            role=share.role,
            tp=share.tp,
            pp=share.pp,
            readings=running.count,
            running=running.mean,
            waiting=_gauge(service, "requests waiting", share.replica).mean,
            receiving=_gauge(service, "requests receiving KV", share.replica).mean,
            kv_share=kv.mean,
            kv_peak=kv.max,
            collective_share=_gauge(service, "communication share", share.replica).mean,
            stage_idle=tuple(_idle(service, share.replica)),
        )


def _idle(service: Service, replica: str) -> Iterator[float]:
    stages = service.gauges.get("stage idle", {})
    stage = 0
    while (where := f"{replica} {stage}") in stages:
        yield stages[where].mean
        stage += 1


def _gauge(service: Service, what: str, where: str) -> Spread:
    return service.gauges.get(what, {}).get(where, Spread())
