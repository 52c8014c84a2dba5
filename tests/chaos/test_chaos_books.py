"""The chaos harness must be able to fail: each kind of dishonest answer, and each leak, is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chaos_clients import CUT, ERROR, RIGHT, WRONG, Ask, Client, Outcome, Truth
from chaos_faults import FAULTS
from chaos_plan import SEEDS, costly, pairs, plan
from chaos_report import Report, table
from chaos_round import NOT_REACHED, Row
from chaos_stages import STAGES
from soak_memory import Sample, not_flat

ASK = Ask(number=1, length=4, n=2)
TEXTS = {0: "abcdef", 1: "ghijkl"}


class CalmClient(Client):
    """Answers as the truth does, without a gateway."""

    def __init__(self) -> None:
        pass

    async def ask(self, ask: Ask, *, leave: asyncio.Event | None = None) -> Outcome:
        return Outcome(texts=dict(TEXTS), finished={0, 1})


async def judged(**outcome: Any) -> str:
    return (await Truth(CalmClient()).judge(ASK, Outcome(**outcome))).kind


async def test_only_the_whole_right_text_of_every_choice_is_right():
    assert await judged(texts=dict(TEXTS), finished={0, 1}) == RIGHT
    assert await judged(texts={**TEXTS, 1: "ghijkx"}, finished={0, 1}) == WRONG
    assert await judged(texts={**TEXTS, 1: "ghi"}, finished={0, 1}) == WRONG
    assert await judged(texts=dict(TEXTS), finished={0}) == CUT
    assert await judged(texts={0: "abcdef"}, finished={0}) == CUT


async def test_an_error_may_follow_the_beginning_of_the_right_text_and_no_other():
    assert await judged(kind=ERROR, texts={0: "abc"}) == ERROR
    assert await judged(kind=ERROR, texts={0: "abx"}) == WRONG


def test_the_seeds_together_kill_and_pause_everything_in_every_state():
    plans = [plan(seed, hosts=True, link=True) for seed in range(1, SEEDS + 1)]
    dealt = {(fault.name, state) for some in plans for fault, state in some}
    every = {(fault.name, state) for fault, state in pairs(hosts=True, link=True)}
    assert sum(map(len, plans)) >= 500
    assert {pair for pair in every if not costly(FAULTS[pair[0]])} <= dealt
    sides = [name for name in FAULTS if name.startswith("SIGKILL") or name.endswith("SIGCONT")]
    assert len(sides) == 12
    assert {(name, state) for name in sides for state in STAGES} <= dealt
    more = {(f.name, s) for seed in range(1, 6) for f, s in plan(seed, hosts=True, link=True)}
    assert more == every


def test_without_hosts_no_link_is_touched():
    left = list(pairs(hosts=False, link=False))
    assert left
    assert not [1 for fault, state in left if fault.hosts or fault.link or STAGES[state].link]
    assert any(costly(fault) for fault, _ in left)


def test_what_did_not_come_about_is_counted_and_a_breach_is_a_verdict():
    rows = [
        Row(fault="f", state="s", outcome="right", recovery_s=2.0),
        Row(fault="f", state="s", outcome="right", recovery_s=4.0, breaches=["leaked: 1"]),
        Row(fault="f", state="s", outcome=NOT_REACHED),
    ]
    report = Report(kv_transport="ucx", seeds=[1], seconds=60, skipped="", rows=rows)
    assert len(report.injected) == 2
    assert report.breaches == ["seed 0: f while s: leaked: 1"]
    assert "1 states did not come about" in report.verdict()
    assert table(report)[1] == ("f", "s", "2", "right", "", "3.0", "4.0")


def memory(*resident_mib: float, descriptors: int = 10) -> list[Sample]:
    return [
        Sample(
            requests=100 * place,
            resident=int(mib * 2**20),
            shared=0,
            pinned=0,
            descriptors=descriptors + place * (descriptors > 10),
            threads=4,
        )
        for place, mib in enumerate(resident_mib)
    ]


def test_memory_that_rises_to_the_end_is_not_flat_and_memory_that_settles_is():
    assert not not_flat("p", memory(100, 180, 200, 201, 200, 201, 200, 201))
    assert not_flat("p", memory(100, 180, 200, 205, 210, 215, 220, 225)) != []
    assert "descriptors" in not_flat("p", memory(*[200] * 8, descriptors=11))[0]


@pytest.mark.parametrize("stage", STAGES.values(), ids=str)
def test_every_state_is_brought_about_by_something(stage):
    assert stage.point or stage.rate or stage.hogs or stage.max_tokens > 100
