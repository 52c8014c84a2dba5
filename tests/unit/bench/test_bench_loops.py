"""Open and closed loops over an asker that owns the clock: lateness is never hidden."""

import asyncio
import itertools
import math
from typing import Any

import pytest

from ekiden.bench.asking import Due
from ekiden.bench.driving import closed_loop, open_loop
from ekiden.bench.record import Record
from ekiden.bench.workload import Ask, Drawn, Shape
from ekiden.core.clock import ManualClock

ASKS = Drawn(shapes=(Shape(2, 2),))


class Slow:
    """Answers after ``takes_s`` of a clock that moves by nothing else."""

    def __init__(self, clock: ManualClock, takes_s: float) -> None:
        self.clock, self.takes_s = clock, takes_s
        self.at_once = self.most = 0
        self.numbers: list[int] = []

    def due(self, ask: Ask, at: float) -> Due:
        return Due(ask, b"", at)

    async def ask(self, due: Due) -> Record:
        sent = self.clock.now()
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.clock.advance(self.takes_s)
        self.at_once -= 1
        self.numbers.append(due.ask.number)
        return Record(
            index=due.ask.number,
            asked_prompt=2,
            asked_output=2,
            scheduled_s=due.at,
            sent_s=sent,
            first_s=self.clock.now(),
            ended_s=self.clock.now(),
        )


def asks() -> Any:
    return map(ASKS.ask, itertools.count())


async def test_a_server_that_stalls_shows_in_every_request_that_was_due_meanwhile():
    """Coordinated omission: from the moments of sending all would look equally quick."""
    clock, found = ManualClock(), list[Record]()
    asker: Any = Slow(clock, takes_s=10.0)
    moments = [0.0, 0.001, 0.002, 0.003]
    await open_loop(asker, asks(), moments, found.append, clock=clock, max_in_flight=1)
    assert [row.ttft_s for row in found] == pytest.approx([10, 20, 30, 40], abs=0.01)
    assert [row.lag_s for row in found] == pytest.approx([0, 10, 20, 30], abs=0.01)
    assert {round(row.ended_s - row.sent_s) for row in found} == {10}


async def test_an_open_loop_does_not_wait_for_answers():
    clock, found = ManualClock(), list[Record]()
    asker: Any = Slow(clock, takes_s=1.0)
    await open_loop(asker, asks(), [0.0] * 5, found.append, clock=clock, max_in_flight=9)
    assert asker.most == 5
    assert [row.lag_s for row in found] == [0] * 5


async def test_an_open_loop_keeps_its_limit_in_flight():
    clock = ManualClock()
    asker: Any = Slow(clock, takes_s=1.0)
    await open_loop(asker, asks(), [0.0] * 7, lambda _: None, clock=clock, max_in_flight=3)
    assert asker.most == 3


async def test_a_closed_loop_has_so_many_at_a_time_and_sends_each_request_once():
    clock, found = ManualClock(), list[Record]()
    asker: Any = Slow(clock, takes_s=1.0)
    await closed_loop(
        asker, itertools.islice(asks(), 20), found.append,
        clock=clock, concurrency=4, start=0.0, end=math.inf,
    )  # fmt: skip
    assert asker.most == 4
    assert sorted(asker.numbers) == list(range(20))
    assert all(row.lag_s == 0 for row in found)


async def test_a_closed_loop_sends_nothing_after_its_end():
    clock, found = ManualClock(), list[Record]()
    asker: Any = Slow(clock, takes_s=1.0)
    await closed_loop(asker, asks(), found.append, clock=clock, concurrency=1, start=0.0, end=4.5)
    assert [row.sent_s for row in found] == [0, 1, 2, 3, 4]
