"""Evidence of a deployment that nothing ails, and ways to spoil a part of it."""

from __future__ import annotations

from typing import Any

import msgspec

from ekiden.doctor.evidence import (
    Answers,
    Client,
    Evidence,
    Experts,
    Host,
    Load,
    Replica,
    SamePrompts,
    Situation,
    Times,
    Wire,
)
from ekiden.measures.experts import Balancedness

replace: Any = msgspec.structs.replace

ANSWERS = Answers(
    count=200,
    tokens_per_s=400.0,
    ttft=Times(count=200, p50=0.12, p95=0.2, p99=0.25),
    tpot=Times(count=200, p50=0.012, p95=0.02, p99=0.025),
    phases={
        "queue": 0.02,
        "prefill": 0.09,
        "transfer": 0.004,
        "first_decode": 0.01,
        "decode": 0.4,
    },
    prompt_tokens=800.0,
    output_tokens=40.0,
    sources={"prefill_computed": 120_000.0, "decode_cache": 40_000.0},
    predicted_cached=42_000.0,
    moved={"shm": 3e8},
    shares={"decode": {"d-1": 4000, "d-2": 4200}, "prefill": {"p-1": 160_000}},
)
PREFILL = Replica(
    id="p-1", role="prefill", host="10.0.0.6", tp=2, pp=1, max_num_seqs=64, readings=10,
    running=1.5, waiting=0.2, kv_share=0.2, kv_peak=0.4, prefill_tokens_per_s=9000.0,
    collective_share=0.1, stage_idle=(0.3,),
)  # fmt: skip
DECODE = Replica(
    id="d-1", role="decode", host="10.0.0.7", tp=1, pp=1, max_num_seqs=64, readings=10,
    running=6.0, waiting=0.1, kv_share=0.4, kv_peak=0.6, step_s=0.012, stage_idle=(0.2,),
    wires=(Wire(peer="p-1", wire="shm", bytes_per_s=8e9),),
)  # fmt: skip
OTHER = replace(DECODE, id="d-2", running=5.5)
EXPERTS = Experts(
    role="decode",
    steps=400,
    tokens=900.0,
    hottest=1.4,
    balancedness=Balancedness(p50=0.86, p95=0.8, worst=0.7),
    dispatch_share=0.15,
)
WATCHED = Situation(
    name="watched for 10 s",
    seconds=10.0,
    answers=ANSWERS,
    replicas=(OTHER, DECODE, PREFILL),
    in_flight=13.0,
)
LEVEL = replace(
    WATCHED,
    name="run.json, concurrency 8",
    load=Load(kind="concurrency", value=8.0),
    client=Client(cpu_share=0.3, lag_p99_s=0.001),
    experts=(EXPERTS,),
)
TWICE = replace(
    LEVEL,
    name="four.json, concurrency 16",
    load=Load(kind="concurrency", value=16.0),
    replicas=(*LEVEL.replicas, replace(DECODE, id="d-3"), replace(OTHER, id="d-4")),
    answers=replace(ANSWERS, tokens_per_s=760.0),
)
HEALTHY = Evidence(
    situations=(WATCHED, LEVEL, TWICE),
    host=Host(cores=16, load=9.0, replicas=("d-1",)),
    same_prompts=SamePrompts(asked=100, equal=99, against="http://other:8000"),
)


def watched(**answers: Any) -> Evidence:
    """Healthy but for these figures of the answers."""
    return spoilt(replace(WATCHED, answers=replace(ANSWERS, **answers)))


def with_replica(replica: Replica, **changes: Any) -> Evidence:
    """Healthy but for one replica, and what else of the situation is told."""
    others = [one for one in WATCHED.replicas if one.id != replica.id]
    return spoilt(replace(WATCHED, replicas=(*others, replica), **changes))


def mixture(experts: Experts, **answers: Any) -> Evidence:
    """Healthy but for the experts of a mixture, and these figures of the answers."""
    return spoilt(replace(LEVEL, experts=(experts,), answers=replace(ANSWERS, **answers)))


def spoilt(*situations: Situation, **changes: Any) -> Evidence:
    return replace(HEALTHY, situations=situations, **changes)
