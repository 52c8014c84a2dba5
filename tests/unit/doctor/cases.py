"""Evidence of each trouble, and of what only looks like one."""

from __future__ import annotations

from healthy import (
    ANSWERS,
    DECODE,
    EXPERTS,
    HEALTHY,
    LEVEL,
    OTHER,
    PREFILL,
    WATCHED,
    mixture,
    replace,
    spoilt,
    watched,
    with_replica,
)

from ekiden.doctor.evidence import Client, Evidence, Host, Objectives, SamePrompts, Times
from ekiden.doctor.finding import Cause
from ekiden.doctor.symptoms import diagnose
from ekiden.measures.experts import Balancedness

CROWDED = Host(cores=2, load=8.0, replicas=("d-1",))
LATE = Times(count=200, mean=2.2, p50=2.0, p95=5.0, p99=6.0)
JITTERY = Times(count=200, p50=0.012, p95=0.2, p99=0.3)
UNEVEN = replace(DECODE, pp=2, stage_idle=(0.1, 0.6))
BUBBLE = replace(DECODE, pp=2, stage_idle=(0.6, 0.62))
HOT = replace(
    EXPERTS,
    hottest=6.0,
    dispatch_share=0.4,
    balancedness=Balancedness(p50=0.5, p95=0.45, worst=0.3),
)
BY_KIND = replace(HOT, balancedness=Balancedness(p50=0.8, p95=0.5, worst=0.3))
UNSTEADY = Times(count=200, p50=0.012, p95=0.02, p99=0.05)

CASES: dict[str, tuple[str, Evidence, str]] = {
    "mostly collectives": (
        "R43",
        with_replica(replace(DECODE, tp=4, collective_share=0.9)),
        "spends more in its collectives",
    ),
    "jitter, by communication": (
        "R44",
        with_replica(
            replace(DECODE, tp=2, collective_share=0.4), answers=replace(ANSWERS, tpot=JITTERY)
        ),
        "communication",
    ),
    "jitter, by a full cache": (
        "R44",
        watched(tpot=JITTERY, fallbacks={"preempted": 9}),
        "KV runs out",
    ),
    "jitter, by prompts between tokens": (
        "R44",
        watched(tpot=JITTERY, sources={"local_computed": 1e5}),
        "in the steps that answers wait for",
    ),
    "jitter, by a crowd": (
        "R44",
        replace(watched(tpot=JITTERY), host=CROWDED),
        "more processes want this host's cores",
    ),
    "jitter, by nothing that shows": ("R44", watched(tpot=JITTERY), "memory bandwidth"),
    "an objective missed": (
        "R44",
        replace(HEALTHY, objectives=Objectives(tpot_s=0.01)),
        "memory bandwidth",
    ),
    "a slow stage": ("R45", with_replica(UNEVEN), "stage 0 is the slowest"),
    "a bubble": ("R45", with_replica(BUBBLE), "bubble"),
    "experts that are hot in every step": ("R46", mixture(HOT), "in most steps"),
    "experts that are hot for one kind of prompt": (
        "R46",
        mixture(BY_KIND, tpot=UNSTEADY),
        "change with the kinds of prompts",
    ),
    "hot experts seen by the tail alone": (
        "R46",
        mixture(replace(HOT, dispatch_share=0.05), tpot=UNSTEADY),
        "in most steps",
    ),
    "a full cache": ("R47", with_replica(replace(DECODE, kv_peak=0.99, waiting=3.0)), "smaller"),
    "no room for one more prompt": (
        "R47",
        with_replica(replace(DECODE, kv_peak=0.7, kv_tokens=2000, waiting=3.0)),
        "smaller",
    ),
    "answers put back": ("R47", watched(fallbacks={"preempted": 20}), "smaller"),
    "prompts refused": (
        "R47",
        watched(errors={"http_400": 3}, error_details={"http_400": "wants 90 KV blocks of 80"}),
        "smaller",
    ),
    "a full wire": ("R48", watched(moved={"shm": 1.5e11}), "fills the wire shm"),
    "a replica lost": ("R49", with_replica(replace(DECODE, tp=8, lost="gone")), "8 ranks are one"),
    "a rank that stands still": ("R49", with_replica(replace(DECODE, lost="unwell")), "unwell"),
    "a queue beside an idle one": (
        "R50",
        with_replica(replace(DECODE, waiting=20.0), in_flight=30.0),
        "dealt out by number",
    ),
    "unequal shares": (
        "R50",
        watched(ttft=replace(LATE, p50=0.2), shares={"decode": {"d-1": 9000, "d-2": 400}}),
        "dealt out by number",
    ),
    "a client at its limit": (
        "R51",
        spoilt(replace(LEVEL, client=Client(cpu_share=0.97, lag_p99_s=0.001))),
        "the load itself",
    ),
    "a gateway that holds requests": ("R51", spoilt(replace(WATCHED, in_flight=80.0)), "gateway"),
    "a batch of few": (
        "R51",
        with_replica(replace(DECODE, max_num_seqs=2, running=2.0, waiting=6.0), in_flight=20.0),
        "batch is capped",
    ),
    "time between steps": (
        "R51",
        with_replica(replace(DECODE, stage_idle=(0.8,), waiting=4.0)),
        "between steps",
    ),
    "busy with collectives": (
        "R52",
        with_replica(replace(DECODE, tp=2, collective_share=0.45, stage_idle=(0.05,), waiting=4.0)),
        "communicate",
    ),
    "busy in a crowd": (
        "R52",
        replace(with_replica(replace(DECODE, stage_idle=(0.05,), waiting=4.0)), host=CROWDED),
        "more processes want",
    ),
    "a queue for KV": (
        "R53",
        with_replica(
            replace(DECODE, kv_peak=0.98, waiting=6.0),
            answers=replace(ANSWERS, ttft=LATE, phases={"queue": 1.8, "prefill": 0.2}),
        ),
        "room in the KV of decode",
    ),
    "a queue": (
        "R53",
        watched(ttft=LATE, phases={"queue": 1.8, "prefill": 0.2}),
        "queue for prefill",
    ),
    "long prompts": (
        "R53",
        replace(
            watched(ttft=LATE, phases={"queue": 0.01, "prefill": 1.9}),
            objectives=Objectives(ttft_s=1.0),
        ),
        "prompts are long",
    ),
    "time before a replica": (
        "R53",
        replace(
            watched(ttft=LATE, phases={"queue": 0.01, "prefill": 0.1}),
            objectives=Objectives(ttft_s=1.0),
        ),
        "before a replica has the request",
    ),
    "no answer at all": (
        "R53",
        spoilt(replace(WATCHED, answers=replace(ANSWERS, count=0), in_flight=3.0)),
        "none was answered",
    ),
    "other answers": (
        "R54",
        replace(HEALTHY, same_prompts=SamePrompts(asked=100, equal=60, against="http://o")),
        "does not suit",
    ),
    "a slow link": (
        "R55",
        watched(phases={"prefill": 0.1, "transfer": 0.4, "first_decode": 0.01}),
        "the link",
    ),
    "short prompts": (
        "R55",
        watched(
            prompt_tokens=100.0, phases={"prefill": 0.01, "transfer": 0.1, "first_decode": 0.01}
        ),
        "the prompts are short",
    ),
    "too little prefill": (
        "R55",
        with_replica(replace(PREFILL, waiting=8.0), in_flight=22.0),
        "prefill has too few replicas",
    ),
}
"""By name: where it belongs, the evidence, words of the first cause."""

QUICK = Times(count=200, p50=0.001, p95=0.009, p99=0.01)
NEAR: dict[str, tuple[str, Evidence]] = {
    "stage links are not collectives of TP": (
        "R43", with_replica(replace(DECODE, tp=2, pp=2, collective_share=0.9))
    ),
    "a difference that nobody sees": ("R44", watched(tpot=QUICK)),
    "a pipeline with one request": ("R45", with_replica(replace(UNEVEN, running=1.0, waiting=0.0))),
    "hot experts that nobody feels": ("R46", mixture(replace(HOT, dispatch_share=0.1))),
    "hot experts on ranks that share the tokens": (
        "R46", mixture(replace(HOT, balancedness=EXPERTS.balancedness))
    ),
    "a mixture over a slow link": ("R46", mixture(replace(EXPERTS, dispatch_share=0.7))),
    "a mixture with an unsteady tail of its own": (
        "R46", mixture(EXPERTS, tpot=replace(ANSWERS.tpot, p99=0.5))
    ),
    "few tokens in a step, on experts that are all alike": (
        "R46", mixture(replace(HOT, hottest=1.5))
    ),
    "too few tokens to call an expert hot": ("R46", mixture(replace(HOT, tokens=5.0))),
    "a cache that is full and enough": (
        "R47", with_replica(replace(DECODE, kv_peak=0.99, waiting=0.0))
    ),
    "one more of two replicas in a queue that the other shares": (
        "R50",
        spoilt(
            replace(
                WATCHED,
                replicas=(replace(DECODE, waiting=20.0), replace(OTHER, running=1.0, waiting=1.0)),
            )
        ),
    ),
    "a queue for one model beside idle replicas of another": (
        "R50",
        spoilt(
            replace(
                WATCHED,
                replicas=(replace(DECODE, waiting=20.0, model="m"), replace(OTHER, model="n")),
            )
        ),
    ),
    "prefill of one model beside decode of another": (
        "R55",
        spoilt(
            replace(
                WATCHED,
                replicas=(replace(PREFILL, waiting=9.0, model="m"), replace(DECODE, model="n")),
            )
        ),
    ),
    "unequal shares and equal waits": (
        "R50", watched(shares={"decode": {"d-1": 9000, "d-2": 400}})
    ),
    "a moment of one request in the gateway": (
        "R51", spoilt(replace(WATCHED, in_flight=1.0, replicas=(replace(DECODE, running=0.0),)))
    ),
    "requests whose KV is on its way over a slow wire": (
        "R51",
        spoilt(
            replace(WATCHED, in_flight=80.0, replicas=(PREFILL, replace(DECODE, receiving=70.0)))
        ),
    ),
    "a replica that receives KV beside one that queues": (
        "R50",
        spoilt(
            replace(
                WATCHED,
                replicas=(
                    replace(DECODE, waiting=20.0), replace(OTHER, running=0.0, receiving=30.0)
                ),
            )
        ),
    ),
    "busy, and nobody waits": (
        "R52",
        with_replica(
            replace(DECODE, tp=2, collective_share=0.45, stage_idle=(0.05,), waiting=0.0)
        ),
    ),
    "a queue that is short": ("R53", watched(phases={"queue": 0.05, "prefill": 0.01})),
    "a long prefill without an objective": (
        "R53", watched(ttft=LATE, phases={"queue": 0.3, "prefill": 1.9})
    ),
    "a transfer that is short": (
        "R55", watched(phases={"prefill": 0.001, "transfer": 0.005, "first_decode": 0.001})
    ),
    "both pools in a queue": (
        "R55",
        spoilt(
            replace(
                WATCHED, replicas=(replace(DECODE, waiting=9.0), replace(PREFILL, waiting=9.0))
            )
        ),
    ),
}  # fmt: skip


def causes(evidence: Evidence, requirement: str) -> tuple[Cause, ...]:
    """What was found under one number."""
    found = {one.requirement: one.causes for one in diagnose(evidence).findings}
    return found.get(requirement, ())
