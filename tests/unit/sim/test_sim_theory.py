"""Where theory has an answer, the simulator comes to the same one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from sim_worlds import requests, run, scenario, stepper

from ekiden.planner.batch import Batch
from ekiden.planner.layout import Layout
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


def test_kv_takes_the_links_time() -> None:
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


def test_transfers_over_one_link_take_turns() -> None:
    one = stepper(network_gbps=0.5)
    asked = requests(3, every_s=0.0, prompt=2000, output=2)
    world = run(scenario(1, 3, stepper=one, policy="round-robin"), asked)
    seconds = one.works[0].kv.sequence_bytes(2000) / one.links.network
    ready = sorted(row.ready_s or 0.0 for row in world.front.records)
    assert [later - earlier for earlier, later in pairwise(ready)] == pytest.approx([seconds] * 2)


def test_steps_follow_one_another_through_stages() -> None:
    """Two stages compute two prompts at once: the second one ends a stage's time later."""
    one = stepper(chunk=PROMPT, layout=Layout(pp=2))
    world = run(scenario(0, 1, stepper=one), requests(2, every_s=0.0, prompt=PROMPT, output=1))
    first, second = (row.ttft_s for row in world.front.records)
    batch = Batch(prefill=PROMPT, seen=PROMPT / 2)
    assert second - first == pytest.approx(one.slowest(batch))
    assert second - first < 0.6 * one.mixed(batch).total


def test_every_row_gets_a_token_for_each_round_of_the_stages() -> None:
    one = stepper(layout=Layout(pp=2))
    world = run(scenario(0, 1, stepper=one), requests(8, every_s=0.0, prompt=16, output=50))
    expected = one.decode(8, 40).total
    for row in world.front.records:
        assert row.tpot_s == pytest.approx(expected, rel=0.1)


def test_groups_of_cp_compute_a_chunk_each_in_a_step() -> None:
    one = stepper(chunk=PROMPT // 4, layout=Layout(cp=4))
    world = run(scenario(1, 1, stepper=one), requests(1, prompt=PROMPT, output=1))
    (row,) = world.front.records
    alone = one.mixed(Batch(prefill=PROMPT, seen=PROMPT / 2)).total
    assert row.first_s is not None
    assert row.started_s is not None
    assert row.first_s - row.started_s == pytest.approx(alone, abs=4 * MESSAGE_S)
