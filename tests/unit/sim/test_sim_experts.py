"""Experts that are hit unevenly: what is drawn, what it costs, and that nothing costs unasked."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_worlds import check_books, moments, requests, run, scenario

from ekiden.core.errors import SetupError
from ekiden.measures.experts import ExpertLoad
from ekiden.measures.goodput import Slo
from ekiden.planner.batch import Batch
from ekiden.planner.calibration import calibration
from ekiden.planner.catalogue import by_name
from ekiden.planner.devices import devices
from ekiden.planner.hardware import gpu
from ekiden.planner.layout import Layout
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica
from ekiden.planner.parts import Moe
from ekiden.planner.routed import Routed
from ekiden.planner.routing import routing
from ekiden.planner.steps import Stepper
from ekiden.sim.asked import Asked
from ekiden.sim.experts import DOMAINS, LAYERS, Popularity, chances
from ekiden.sim.figures import figures
from ekiden.sim.run import World

SPREAD = Layout(dp=8, ep=8)


@cache
def mixture(layout: Layout = SPREAD, model: str = "Qwen3-30B-A3B") -> Stepper:
    machines = devices(gpu("H100"), per_host=8)
    replica = Replica(
        geometry=by_name(model),
        card=machines.card,
        layout=layout,
        limits=Limits(max_model_len=16384, max_num_seqs=64, chunk=2048),
    )
    return Stepper(replica, machines, calibration("vllm"))


def ran(
    skew: float | None, *, seed: int = 0, prefill: int = 0, asked: list[Asked] | None = None
) -> World:
    one = mixture()
    world_of = scenario(prefill, 1, stepper=one, expert_skew=skew, seed=seed)
    return run(world_of, asked or requests(60, every_s=0.01, prompt=4000, output=20))


def load(world: World, role: str = "decode") -> ExpertLoad:
    return world.outcome().experts[role]


@given(st.integers(1, 200), st.floats(0, 4), st.data())
def test_chances_are_at_most_one_and_add_up_to_what_a_token_takes(
    experts: int, skew: float, data: st.DataObject
) -> None:
    taken = data.draw(st.integers(1, experts))
    found = chances(np.arange(1, experts + 1, dtype=float) ** -skew, taken)
    assert found.sum() == pytest.approx(taken)
    assert found.max() <= 1
    assert (np.diff(found) <= 1e-12).all(), "the more popular one is taken more often"


def test_each_kind_of_prompt_has_favourites_of_its_own_in_each_layer() -> None:
    rng = np.random.default_rng(1)
    popularity = Popularity(Moe(experts=64, top_k=4, inner=8), 48, 1.2, rng)
    of_each = [popularity.draw(np.eye(DOMAINS)[d] * 4000, rng) for d in range(DOMAINS)]
    assert all(drawn.shape == (LAYERS, 64) for drawn in of_each)
    favourites = {tuple(drawn.argmax(axis=1)) for drawn in of_each}
    assert len(favourites) == DOMAINS
    assert all(len(set(one)) > 1 for one in favourites)
    mixed = popularity.draw(np.full(DOMAINS, 1000.0), rng)
    assert mixed.max() < 0.7 * max(drawn.max() for drawn in of_each)


def test_a_step_takes_as_long_as_its_busiest_rank() -> None:
    one = mixture()
    told = one.told
    tokens = 4096.0
    even = np.ones((2, 8))
    hot = np.ones((2, 8))
    hot[:, 3] = 3.0
    batch = {"prefill": tokens, "seen": 100.0}
    level, uneven = (
        one.mixed(Batch(**batch, routed=Routed(rank, even))).weights for rank in (even, hot)
    )
    as_told = one.mixed(Batch(**batch)).weights
    busiest = 3.0 * 8 / 10
    products = (as_told - level) / (1 / told.balance - 1)
    assert uneven - level == pytest.approx((busiest - 1) * products)


def test_messages_take_as_long_as_those_of_the_rank_to_which_most_goes() -> None:
    one, even = mixture(), np.ones((1, 8))
    hot = even + 7 * np.eye(8)[:1]
    level, uneven = (
        Batch(prefill=4096.0, seen=100.0, routed=Routed(rank, even)) for rank in (even, hot)
    )
    size, way = 4096 * one.replica.geometry.hidden * 2, routing(one.replica.geometry)
    mean, most = (one.links.all_to_all(8, size * times, way) for times in (1, 8 * 8 / 15))
    fabric = 2 * 48 * (most - mean)
    added = one.mixed(uneven).communication - one.mixed(level).communication
    assert added == pytest.approx(fabric)
    waited = one.dispatch(uneven) - one.dispatch(level) - fabric
    products = one.mixed(uneven).weights - one.mixed(level).weights
    assert waited == pytest.approx(products, rel=0.05), "all but the busiest wait for it"


def test_a_rank_reads_the_experts_that_its_tokens_take() -> None:
    one, even = mixture(), np.ones((1, 8))
    all_read, half = (
        one.mixed(Batch(decode=1, context=100.0, routed=Routed(even, part * even))).weights
        for part in (1.0, 0.5)
    )
    assert half < all_read


def test_a_skew_makes_ranks_uneven_steps_longer_and_the_histogram_tell_so() -> None:
    alike, skewed = load(ran(0.0)), load(ran(1.0))
    assert alike.balancedness.p50 > 0.9
    assert skewed.balancedness.p50 < 0.8
    assert skewed.balancedness.worst <= skewed.balancedness.p95 <= skewed.balancedness.p50
    assert skewed.dispatch_share > 1.2 * alike.dispatch_share
    hottest = [max(one.tokens[0]) / (sum(one.tokens[0]) / 128) for one in (alike, skewed)]
    assert hottest[0] < 1.2
    assert hottest[1] > 2
    slow, quick = (figures("", ran(skew).outcome(), Slo()).ttft_ms.p50 for skew in (1.0, 0.0))
    assert slow > 1.1 * quick


def test_every_token_of_a_step_is_dealt_to_about_top_k_experts() -> None:
    world = ran(1.0)
    dealt = sum(load(world).tokens[0])
    computed = sum(span.computed_tokens for span in world.outcome().spans)
    assert dealt == pytest.approx(8 * computed, rel=0.01)
    check_books(world)


def test_prompts_of_one_kind_are_more_uneven_than_a_mixture_of_all() -> None:
    """A step of few long prompts has few kinds; one of many answers has all of them."""
    apart = ran(1.0, prefill=1)
    few = load(apart, "prefill").balancedness
    many = load(ran(1.0, asked=requests(400, every_s=0.0, prompt=16, output=60))).balancedness
    assert few.p50 < many.p50


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    first, again, other = (ran(1.0, seed=seed) for seed in (3, 3, 4))
    assert moments(first.front.records) == moments(again.front.records)
    assert load(first) == load(again)
    assert load(first) != load(other)


def test_without_a_skew_nothing_is_drawn_or_told() -> None:
    world = ran(None)
    assert world.outcome().experts == {}
    assert all(pool.experts is None for pool in figures("", world.outcome(), Slo()).pools)


def test_steps_with_drawn_experts_do_not_depend_on_strides() -> None:
    one = mixture()
    asked = requests(20, every_s=0.02)
    quick, slow = (
        run(scenario(0, 1, stepper=one, expert_skew=1.0, strides=strides), asked)
        for strides in (True, False)
    )
    assert moments(quick.front.records) == moments(slow.front.records)


@pytest.mark.parametrize(
    ("stepper", "skew", "says"),
    [
        (mixture(Layout(tp=2), "Llama-3.1-8B"), 1.0, "needs a mixture .* Llama-3.1-8B is dense"),
        (mixture(Layout(tp=2)), 1.0, "each rank of TP2 has a part .*choose EP 2 or more"),
        (mixture(), -1.0, "-1 is no exponent: choose 0, all experts alike, to 4"),
        (mixture(), float("nan"), "nan is no exponent"),
    ],
)
def test_a_skew_that_means_nothing_is_refused(stepper: Stepper, skew: float, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        scenario(0, 1, stepper=stepper, expert_skew=skew).check()
