"""Each trouble is named from evidence of it, and healthy evidence is clean of all of them."""

from __future__ import annotations

import msgspec
import pytest
from cases import CASES, CROWDED, JITTERY, NEAR, causes
from healthy import (
    ANSWERS,
    DECODE,
    HEALTHY,
    OTHER,
    PREFILL,
    WATCHED,
    replace,
    spoilt,
    with_replica,
)

from ekiden.doctor.evidence import (
    Evidence,
    Situation,
)
from ekiden.doctor.finding import Diagnosis
from ekiden.doctor.symptoms import SYMPTOMS, diagnose


def test_healthy_evidence_of_every_kind_is_clean() -> None:
    found = diagnose(HEALTHY)
    assert found.findings == ()
    assert found.unseen == ()
    assert len(found.clean) == len(SYMPTOMS)


def test_experts_that_nobody_tells_of_are_not_called_even() -> None:
    found = diagnose(spoilt(*(replace(one, experts=()) for one in HEALTHY.situations)))
    assert [one.requirement for one in found.unseen] == ["R46"]


def test_every_row_of_the_table_is_there_once() -> None:
    assert [symptom.requirement for symptom in SYMPTOMS] == [f"R{n}" for n in range(43, 56)]


def test_without_evidence_every_rule_says_what_it_lacks() -> None:
    found = diagnose(Evidence(missing={"gateway": "http://g tells nothing"}))
    assert found.findings == () == found.clean
    assert len(found.unseen) == len(SYMPTOMS)
    assert {one.reason for one in found.unseen} > {"http://g tells nothing"}
    assert all(one.reason for one in found.unseen)


def test_what_nobody_asks_for_is_not_called_clean() -> None:
    resting = tuple(replace(one, running=0.0, waiting=0.0) for one in WATCHED.replicas)
    idle = replace(
        WATCHED, answers=replace(ANSWERS, count=0), in_flight=0.0, replicas=resting
    )  # fmt: skip
    found = diagnose(spoilt(idle, same_prompts=None))
    assert found.findings == ()
    assert found.clean == ("R49",)


@pytest.mark.parametrize("name", CASES)
def test_the_trouble_is_named_and_comes_first(name: str) -> None:
    requirement, evidence, words = CASES[name]
    found = causes(evidence, requirement)
    assert found, diagnose(evidence).findings
    assert words in found[0].what
    assert 0 < found[0].confidence <= 1
    assert found[0].seen
    assert found[0].remedy


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


def test_experts_that_are_hot_now_and_then_are_not_said_to_be_hot_always() -> None:
    (cause,) = causes(CASES["experts that are hot for one kind of prompt"][1], "R46")
    assert "kinds of prompts" in cause.what


def test_a_lost_replica_whose_pool_lives_on_matters_less_than_a_whole_pool() -> None:
    gone = replace(DECODE, lost="gone")
    (alone,) = causes(spoilt(replace(WATCHED, replicas=(gone, PREFILL))), "R49")
    (one_of_two,) = causes(spoilt(replace(WATCHED, replicas=(gone, OTHER))), "R49")
    assert alone.confidence > one_of_two.confidence


def test_a_diagnosis_can_be_read_back_from_its_json() -> None:
    found = diagnose(CASES["a queue"][1])
    again = msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis)
    assert again == found
    assert msgspec.json.decode(msgspec.json.encode(found))["schema"] == "ekiden.doctor/1"
