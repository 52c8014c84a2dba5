"""The gateway's router in the simulator: it is the real one, and it is worth something."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from sim_worlds import moments, requests, run, scenario

from ekiden.measures.goodput import Slo
from ekiden.planner.workload import workload
from ekiden.sim.asked import Asked, drawn
from ekiden.sim.figures import Figures, figures
from ekiden.sim.run import World
from ekiden.sim.scenario import Autoscale, Kill, Scenario
from gateway import placing
from gateway.routing import Scored

SEEDS = 3


def told(world_of: Scenario, asked: list[Asked]) -> Figures:
    return figures("", run(world_of, asked).outcome(), Slo())


def skewed(count: int, every_s: float, seed: int = 0) -> list[Asked]:
    """One prompt in four is long: in turn, the long ones always meet the same replica."""
    rng, due, found = random.Random(seed), 0.0, []
    for number in range(count):
        due += rng.expovariate(1 / every_s)
        prompt = 12_000 if number % 4 == 0 else 200
        found.append(Asked(number=number, due_s=due, prompt=prompt, output=40))
    return found


def repeated(count: int) -> list[Asked]:
    """The same prompt again and again, long after the last one ended."""
    return [
        Asked(number=i, due_s=5.0 * i, prompt=2048, output=4, ids=(1, 2, 3, 4))
        for i in range(count)
    ]


def test_equal_prompts_hit_as_many_blocks_as_they_have() -> None:
    asked = [
        Asked(number=i, due_s=5.0 * i, prompt=2048, output=4, ids=(1, 2, 3, 4)) for i in (0, 1)
    ]
    world = run(scenario(0, 1), asked)
    assert [row.decode_cache for row in world.front.records] == [0, 2047 // 16 * 16]
    assert world.front.records[1].predicted_cached == 2048


def test_a_prefix_hits_up_to_the_block_where_prompts_part() -> None:
    ids = [(1, 2, 3), (1, 2, 4), (5, 2, 3)]
    asked = [
        Asked(number=i, due_s=5.0 * i, prompt=1536, output=4, ids=one) for i, one in enumerate(ids)
    ]
    world = run(scenario(0, 1), asked)
    assert [row.decode_cache for row in world.front.records] == [0, 1024, 0]


def test_a_drawn_workload_shares_what_was_asked_of_its_prompts() -> None:
    asked = drawn(workload("chat", prefix_share=0.5), 0.2, 6, random.Random(1))
    world = run(scenario(0, 1), asked)
    assert [row.decode_cache for row in world.front.records] == [0, *[100 // 16 * 16] * 5]


def test_prefill_hits_its_own_cache_where_decode_has_none() -> None:
    asked = [
        Asked(number=i, due_s=5.0 * i, prompt=2048, output=4, ids=(1, 2, 3, 4)) for i in range(8)
    ]
    world = run(scenario(1, 4, policy="round-robin"), asked)
    second = world.front.records[1]
    assert (second.decode_cache, second.prefill_cache) == (0, 2047 // 16 * 16)
    fifth = world.front.records[4]
    assert fifth.decode_cache == 2047 // 16 * 16
    assert fifth.prefill_replica == ""  # what is not cached is short enough for decode


def test_round_robin_is_worse_where_requests_are_unequal() -> None:
    asked = skewed(200, every_s=0.04)
    ours, turns = (told(scenario(0, 4, policy=p), asked) for p in ("router", "round-robin"))
    assert ours.ttft_ms.p95 < 0.2 * turns.ttft_ms.p95
    assert ours.ttft_ms.mean < 0.3 * turns.ttft_ms.mean


def test_counting_requests_is_worse_where_prompts_are_unequal() -> None:
    asked = skewed(200, every_s=0.025, seed=1)
    ours, counted = (told(scenario(0, 4, policy=p), asked) for p in ("router", "least-requests"))
    assert ours.ttft_ms.p95 < counted.ttft_ms.p95


@cache
def p95(policy: str, asked: Callable[[int], list[Asked]], **world: Any) -> float:
    """TTFT in ms, the mean of some seeds."""
    found = (told(scenario(policy=policy, seed=s, **world), asked(s)) for s in range(SEEDS))
    return sum(run.ttft_ms.p95 for run in found) / SEEDS


def equal(seed: int) -> list[Asked]:
    """Half of what eight replicas can prefill."""
    return drawn(workload("rag"), 16.0, 120, random.Random(seed))


def unequal(seed: int) -> list[Asked]:
    """One prompt in ten is thirty times as long; seven tenths of what four replicas can prefill."""
    rng, due, found = random.Random(seed), 0.0, []
    for number in range(240):
        due += rng.expovariate(60)
        prompt = 12_000 if rng.random() < 0.1 else 400
        found.append(Asked(number=number, due_s=due, prompt=prompt, output=40))
    return found


AGES = pytest.mark.parametrize("renew_s", [1.0, 30.0], ids=["as they are", "half a minute old"])
"""Of figures: one gateway knows its own requests, and needs no figures for them."""


@AGES
def test_of_equal_requests_the_router_is_no_worse_than_round_robin(renew_s: float) -> None:
    ours = p95("router", equal, prefill=0, decode=8, renew_s=renew_s)
    assert ours <= 1.05 * p95("round-robin", equal, prefill=0, decode=8)


@AGES
@pytest.mark.parametrize(("prefill", "decode"), [(0, 4), (4, 4)])
def test_of_unequal_requests_the_router_is_far_better(
    prefill: int, decode: int, renew_s: float
) -> None:
    ours = p95("router", unequal, prefill=prefill, decode=decode, renew_s=renew_s)
    assert ours < 0.7 * p95("round-robin", unequal, prefill=prefill, decode=decode)


@pytest.mark.parametrize("asked", [equal, unequal])
def test_several_gateways_do_not_all_choose_the_same_replica(
    asked: Callable[[int], list[Asked]],
) -> None:
    """All see the same figures for the same second."""
    world = {"prefill": 0, "decode": 8 if asked is equal else 4, "gateways": 4}
    assert p95("router", asked, **world) < p95("round-robin", asked, **world)


def test_a_router_that_is_broken_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code under test is the gateway's own."""
    asked = skewed(120, every_s=0.04)
    right = run(scenario(0, 4), asked)
    order = placing.order_decode

    def worst(*args: object, **options: object) -> list[Scored]:
        return order(*args, **{**options, "most": None})[::-1]  # type: ignore[arg-type]

    monkeypatch.setattr(placing, "order_decode", worst)
    wrong = run(scenario(0, 4), asked)
    assert moments(right.front.records) != moments(wrong.front.records)
    good, bad = (figures("", world.outcome(), Slo()) for world in (right, wrong))
    assert bad.ttft_ms.p95 > good.ttft_ms.p95


def test_a_replica_that_came_back_is_not_believed_to_have_its_cache() -> None:
    asked = [
        Asked(number=i, due_s=10.0 * i, prompt=2048, output=4, ids=(1, 2, 3, 4)) for i in range(3)
    ]
    death = Kill(at_s=15.0, role="decode")
    world = run(scenario(0, 1, kills=(death,), mttr_s=1.0), asked)
    assert [row.predicted_cached for row in world.front.records] == [0, 2048, 0]
    assert [row.decode_cache for row in world.front.records] == [0, 2032, 0]


def test_an_autoscaled_pool_grows_under_load_and_shrinks_after_it() -> None:
    rising = requests(240, every_s=0.25, prompt=8000, output=60)
    quiet = [Asked(number=240 + i, due_s=60.0 + 5 * i, prompt=500, output=5) for i in range(60)]
    scale = Autoscale(least=1, most=6, every_s=5.0, start_s=10.0, calm_s=30.0)
    world = World(scenario(1, 1, autoscale=scale), [*rising, *quiet])
    world.run()
    lives = [span for span in world.outcome().spans if span.role == "prefill"]
    assert 2 <= len(lives) <= 6
    assert sum(1 for _ in world.pools.of("prefill")) == 1
    assert all(row.ok for row in world.front.records)
    assert min(span.seconds for span in lives) < world.loop.now() - 60


def test_a_draining_replica_finishes_what_it_holds() -> None:
    world = World(scenario(0, 2).check(), requests(20, every_s=0.05, output=200))
    first = next(iter(world.pools.lives.values()))
    world.loop.at(0.5, lambda: world.pools.drain(first))
    world.run()
    assert all(row.ok for row in world.front.records)
    late = [row for row in world.front.records if row.asked.due_s > 0.9]
    assert {row.decode_replica for row in late} == {"decode-1"}
    assert not first.alive
