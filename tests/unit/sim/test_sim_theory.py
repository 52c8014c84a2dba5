"""Where theory has an answer, the simulator comes to the same one."""

from __future__ import annotations

import random

import pytest
from sim_worlds import requests, run, scenario, stepper

from ekiden.planner.steps import Batch
from ekiden.sim.asked import Asked
from ekiden.sim.costs import Costs
from ekiden.sim.handoff import MESSAGE_S

PROMPT = 2048
"""A whole step: no two prompts share one, so that service takes the same time always."""


def poisson(rate: float, count: int, seed: int) -> list[Asked]:
    rng, due, found = random.Random(seed), 0.0, []
    for number in range(count):
        due += rng.expovariate(rate)
        found.append(Asked(number=number, due_s=due, prompt=PROMPT, output=1))
    return found


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_one_prefill_replica_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    one = stepper(chunk=PROMPT)
    service = one.mixed(Batch(prefill=PROMPT, seen=PROMPT / 2)).total
    asked = poisson(load / service, 6000, seed=3)
    world = run(scenario(1, 1, stepper=one, block_size=512), asked)
    before = one.told.request_s + MESSAGE_S
    waits = [row.started_s - row.asked.due_s - before for row in world.front.records]  # type: ignore[operator]
    # An idle replica still asks decode for room, and waits for the answer.
    mean = sum(waits) / len(waits) - (1 - load) * 2 * MESSAGE_S
    assert mean == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)


def test_one_request_takes_the_planners_times() -> None:
    one = stepper()
    world = run(scenario(0, 1), requests(1, prompt=1500, output=101))
    (row,) = world.front.records
    prefill = one.mixed(Batch(prefill=1500, seen=750)).total
    decode = sum(one.decode(1, 1500 + i).total for i in range(1, 101))
    assert row.ttft_s == pytest.approx(one.told.request_s + prefill + 2 * MESSAGE_S)
    assert row.tpot_s == pytest.approx(decode / 100, rel=1e-6)


def test_a_decode_step_between_grid_points_is_the_planners() -> None:
    one = stepper()
    costs = Costs(one)
    for rows, mean in ((1, 100), (7, 1003), (64, 5000)):
        exact = one.decode(rows, mean).total
        assert costs.decode(rows, rows * mean).latency == pytest.approx(exact, rel=1e-9)
    quick = list(costs.latencies(3, 300, 200))
    assert quick == [costs.decode(3, 300 + 3 * step).latency for step in range(200)]


def test_kv_takes_the_links_time_and_a_shared_link_takes_turns() -> None:
    world = run(scenario(1, 1), requests(1, prompt=2000, output=2))
    (row,) = world.front.records
    size = sum(work.kv.sequence_bytes(2000) for work in stepper().works)
    rate = stepper().links.between(crosses_hosts=False)
    assert row.moved_bytes == size
    assert row.ready_s is not None
    assert row.first_s is not None
    assert row.ready_s - row.first_s == pytest.approx(size / rate - MESSAGE_S)
    pool = world.outcome().spans[0]
    assert pool.wire_s == pytest.approx(size / rate)
