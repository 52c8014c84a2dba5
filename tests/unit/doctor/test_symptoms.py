"""Each trouble is named from evidence of it, and healthy evidence is clean of all of them."""

from __future__ import annotations

import msgspec
import pytest
from healthy import (
    ANSWERS,
    DECODE,
    HEALTHY,
    LEVEL,
    OTHER,
    PREFILL,
    WATCHED,
    replace,
    spoilt,
    watched,
    with_replica,
)

from ekiden.doctor.evidence import (
    Client,
    Evidence,
    Host,
    Load,
    Objectives,
    SamePrompts,
    Situation,
    Times,
)
from ekiden.doctor.finding import Cause, Diagnosis
from ekiden.doctor.symptoms import SYMPTOMS, diagnose

CROWDED = Host(cores=2, load=8.0, replicas=("d-1",))


def causes(evidence: Evidence, requirement: str) -> tuple[Cause, ...]:
    """What was found under one number, and that nothing which is healthy was found under it."""
    found = {one.requirement: one.causes for one in diagnose(evidence).findings}
    return found.get(requirement, ())


def test_healthy_evidence_of_every_kind_is_clean() -> None:
    found = diagnose(HEALTHY)
    assert found.findings == ()
    assert [one.requirement for one in found.unseen] == ["R46"]
    assert len(found.clean) == 12


def test_every_row_of_the_table_is_there_once() -> None:
    assert [symptom.requirement for symptom in SYMPTOMS] == [f"R{n}" for n in range(43, 56)]


def test_without_evidence_every_rule_says_what_it_lacks() -> None:
    found = diagnose(Evidence(missing={"gateway": "http://g tells nothing"}))
    assert found.findings == () == found.clean
    assert len(found.unseen) == len(SYMPTOMS)
    assert {one.reason for one in found.unseen} > {"http://g tells nothing"}
    assert all(one.reason for one in found.unseen)


def test_what_nobody_asks_for_is_not_called_clean() -> None:
    idle = replace(WATCHED, answers=replace(ANSWERS, count=0), in_flight=0.0)
    unseen = {one.requirement for one in diagnose(spoilt(idle)).unseen}
    assert {"R44", "R53", "R55"} <= unseen


LATE = Times(count=200, p50=2.0, p95=5.0, p99=6.0)
JITTERY = Times(count=200, p50=0.012, p95=0.2, p99=0.3)
UNEVEN = replace(DECODE, pp=2, stage_idle=(0.1, 0.6))
BUBBLE = replace(DECODE, pp=2, stage_idle=(0.6, 0.62))

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


@pytest.mark.parametrize("name", CASES)
def test_the_trouble_is_named_and_comes_first(name: str) -> None:
    requirement, evidence, words = CASES[name]
    found = causes(evidence, requirement)
    assert found, diagnose(evidence).findings
    assert words in found[0].what
    assert 0 < found[0].confidence <= 1
    assert found[0].seen
    assert found[0].remedy


QUICK = Times(count=200, p50=0.001, p95=0.009, p99=0.01)
NEAR: dict[str, tuple[str, Evidence]] = {
    "stage links are not collectives of TP": (
        "R43", with_replica(replace(DECODE, tp=2, pp=2, collective_share=0.9))
    ),
    "a difference that nobody sees": ("R44", watched(tpot=QUICK)),
    "a pipeline with one request": ("R45", with_replica(replace(UNEVEN, running=1.0, waiting=0.0))),
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
    "unequal shares and equal waits": (
        "R50", watched(shares={"decode": {"d-1": 9000, "d-2": 400}})
    ),
    "a moment of one request in the gateway": (
        "R51", spoilt(replace(WATCHED, in_flight=1.0, replicas=(replace(DECODE, running=0.0),)))
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


@pytest.mark.parametrize("name", NEAR)
def test_what_only_looks_like_a_trouble_is_let_be(name: str) -> None:
    requirement, evidence = NEAR[name]
    assert causes(evidence, requirement) == ()


OF_LOAD = [n for n, (r, *_) in CASES.items() if r not in ("R49", "R54") and "client" not in n]
"""Troubles that are none while nobody asks for anything."""


@pytest.mark.parametrize("name", OF_LOAD)
def test_the_same_figures_without_load_or_at_rest_are_no_trouble(name: str) -> None:
    """An idle replica still tells what it measured long ago."""
    requirement, evidence, _ = CASES[name]
    rested = [
        Situation(
            name=one.name,
            seconds=one.seconds,
            answers=replace(ANSWERS, count=0),
            in_flight=0.0,
            replicas=tuple(
                replace(r, running=0.0, waiting=0.0, kv_share=0.0, kv_peak=0.0)
                for r in one.replicas
            ),
        )
        for one in evidence.situations
    ]
    if requirement in ("R47", "R50", "R48"):
        rested = [replace(one, answers=None) for one in rested]
    assert causes(replace(evidence, situations=tuple(rested)), requirement) == ()


def test_two_causes_of_one_symptom_are_ranked() -> None:
    evidence = replace(
        with_replica(
            replace(DECODE, tp=2, collective_share=0.5),
            answers=replace(ANSWERS, tpot=JITTERY, sources={"local_computed": 1e5}),
        ),
        host=CROWDED,
    )
    found = causes(evidence, "R44")
    assert [one.what.split()[0] for one in found] == ["communication", "prompts", "more"]
    assert [one.confidence for one in found] == sorted((c.confidence for c in found), reverse=True)


def level(name: str, value: float, *, tp: int = 1, decode: int = 1, **answers: object) -> Situation:
    replicas = tuple(replace(DECODE, id=f"{name}-{n}", tp=tp, wires=()) for n in range(decode))
    return replace(
        LEVEL,
        name=name,
        load=Load(kind="concurrency", value=value),
        replicas=replicas,
        in_flight=None,
        answers=replace(ANSWERS, shares={}, **answers),
    )


SLOW = Times(count=200, p50=0.03, p95=0.04, p99=0.05)


def test_two_runs_tell_that_more_tp_is_slower() -> None:
    evidence = spoilt(level("tp4", 8, tp=4, tpot=SLOW), level("tp1", 8))
    (found,) = causes(evidence, "R43")
    assert found.what.startswith("TP4 is slower than TP1")
    assert "TPOT 12.0 ms -> 30.0 ms" in found.seen


def test_runs_of_another_load_or_other_lengths_are_not_compared() -> None:
    other_load = spoilt(level("tp4", 16, tp=4, tpot=SLOW), level("tp1", 8))
    longer = spoilt(level("tp4", 8, tp=4, tpot=SLOW, prompt_tokens=9000.0), level("tp1", 8))
    assert causes(other_load, "R43") == causes(longer, "R43") == ()


def test_more_tp_that_buys_something_is_no_trouble() -> None:
    faster = Times(count=200, p50=0.06, p95=0.1, p99=0.12)
    evidence = spoilt(level("tp4", 8, tp=4, tpot=SLOW, ttft=faster), level("tp1", 8))
    assert causes(evidence, "R43") == ()


def test_replicas_that_add_too_little_are_seen_in_two_runs() -> None:
    evidence = spoilt(level("four", 32, decode=4, tokens_per_s=700.0), level("one", 8))
    (found,) = causes(evidence, "R48")
    assert "4 decode replicas in place of 1 give 1.75 times" in found.seen
    assert "share what one machine has" in found.what
    scaled = spoilt(level("four", 32, decode=4, tokens_per_s=1500.0), level("one", 8))
    assert causes(scaled, "R48") == ()


@pytest.mark.parametrize(
    ("hosts", "words"), [(("a", "b"), ["link"]), (("a", "a"), ["one machine"]),
                         (("", ""), ["one machine", "link"])]
)  # fmt: skip
def test_where_the_replicas_run_tells_what_they_share(
    hosts: tuple[str, str], words: list[str]
) -> None:
    many = level("four", 32, decode=4, tokens_per_s=700.0)
    told = [replace(one, host=hosts[n % 2]) for n, one in enumerate(many.replicas)]
    few = level("one", 8)
    few = replace(few, replicas=tuple(replace(one, host=hosts[0]) for one in few.replicas))
    found = causes(spoilt(replace(many, replicas=tuple(told)), few), "R48")
    assert len(found) == len(words)
    assert all(word in one.what for word, one in zip(words, found, strict=True))


def test_replicas_that_are_asked_for_less_each_are_not_compared() -> None:
    evidence = spoilt(level("four", 8, decode=4, tokens_per_s=500.0), level("one", 8))
    assert causes(evidence, "R48") == ()


def test_a_rate_or_the_same_replicas_tell_nothing_of_scaling() -> None:
    def at_rate(found: Situation) -> Situation:
        return replace(found, load=replace(found.load, kind="rate"))

    many, one = level("four", 32, decode=4, tokens_per_s=500.0), level("one", 8)
    assert causes(spoilt(many, one), "R48")
    assert causes(spoilt(at_rate(many), at_rate(one)), "R48") == ()
    assert causes(spoilt(level("again", 8, tokens_per_s=200.0), one), "R48") == ()


def test_an_aggregated_run_that_is_faster_says_do_not_split() -> None:
    whole = level("whole", 8, moved={})
    apart = level("apart", 8, tpot=SLOW)
    found = causes(spoilt(whole, apart), "R55")
    assert "does not pay" in found[0].what
    assert causes(spoilt(whole, level("apart", 8)), "R55") == ()
    assert causes(spoilt(replace(whole, answers=ANSWERS), apart), "R55") == ()


def test_a_lost_replica_whose_pool_lives_on_matters_less_than_a_whole_pool() -> None:
    gone = replace(DECODE, lost="gone")
    (alone,) = causes(spoilt(replace(WATCHED, replicas=(gone, PREFILL))), "R49")
    (one_of_two,) = causes(spoilt(replace(WATCHED, replicas=(gone, OTHER))), "R49")
    assert alone.confidence > one_of_two.confidence


def test_one_cause_in_many_levels_is_told_once_where_it_shows_best() -> None:
    levels = [
        replace(level(f"l{n}", n), answers=replace(ANSWERS, phases={"queue": n, "prefill": 0.1}))
        for n in (1, 3, 2)
    ]
    (found,) = causes(spoilt(*levels), "R53")
    assert found.confidence == max(
        causes(spoilt(one), "R53")[0].confidence for one in levels
    )  # fmt: skip


def test_a_diagnosis_can_be_read_back_from_its_json() -> None:
    found = diagnose(CASES["a queue"][1])
    again = msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis)
    assert again == found
    assert msgspec.json.decode(msgspec.json.encode(found))["schema"] == "ekiden.doctor/1"
