"""Waiting: known values, limits, and a simulation of the same queue."""

import math
import random
from heapq import heappop, heappush
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given
from plans import stepper

from ekiden.planner.closed import room
from ekiden.planner.devices import devices
from ekiden.planner.hardware import gpu
from ekiden.planner.layout import Layout
from ekiden.planner.queueing import Queue, Service, erlang_c, many_servers, poisson_quantile
from ekiden.planner.serving import aggregated, disaggregated, first_tokens
from ekiden.planner.workload import WORKLOADS, Requests, Workload, workload

CHAT, RAG = WORKLOADS["chat"], WORKLOADS["rag"]


def queue(servers: int, load: float, *busy: float, extra: float = 0.0) -> Queue:
    mean = sum(busy) / len(busy)
    return Queue(
        servers=servers,
        rate=load * servers / mean,
        services=tuple(Service(share=1 / len(busy), busy=b, latency=b + extra) for b in busy),
    )


def test_erlang_c_is_the_textbooks():
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)
    assert erlang_c(3, 3.0) == 1.0
    assert erlang_c(3, 0.0) == 0.0


@pytest.mark.parametrize("load", [0.8, 0.9, 0.97])
def test_the_limit_for_many_servers_meets_the_recursion(load):
    assert many_servers(128, 128 * load) == pytest.approx(erlang_c(128, 128 * load), abs=0.02)
    assert erlang_c(129, 129 * load) <= erlang_c(128, 128 * load) + 0.02


@given(st.integers(1, 64), st.floats(0.01, 0.95))
def test_more_load_never_waits_less(servers, load):
    light, heavy = queue(servers, load, 1.0), queue(servers, load + 0.04, 1.0)
    assert light.quantile(0.95) <= heavy.quantile(0.95) + 1e-6
    assert 0 <= light.waits <= 1


@given(st.floats(0.1, 0.9))
def test_percentiles_are_in_order(load):
    found = [queue(2, load, 1.0, 5.0).quantile(q) for q in (0.5, 0.95, 0.99)]
    assert all(one <= other + 1e-6 for one, other in pairwise(found))


def test_a_queue_that_never_empties_has_no_quantile():
    assert queue(2, 1.0, 1.0).quantile(0.5) == math.inf
    assert queue(2, 1.3, 1.0).tail == math.inf


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.8), (4, 0.8), (8, 0.9)])
def test_the_95th_percentile_is_a_simulations(servers, load):
    asked = queue(servers, load, 0.5, 1.5)
    rng = random.Random(7)
    free = [0.0] * servers
    now, waits = 0.0, []
    for _ in range(60_000):
        now += rng.expovariate(asked.rate)
        start = max(now, heappop(free))
        busy = rng.choice((0.5, 1.5))
        heappush(free, start + busy)
        waits.append(start - now + busy)
    waits.sort()
    seen = waits[int(0.95 * len(waits))]
    assert asked.quantile(0.95) == pytest.approx(seen, rel=0.15)


def test_a_count_has_its_percentiles():
    assert poisson_quantile(100, 50) == 100
    assert poisson_quantile(100, 95) == pytest.approx(116.45)


def test_prompts_of_others_delay_tokens_at_the_tail():
    one = stepper("Llama-3.1-8B", "H100")
    quiet, busy = (aggregated(one, RAG, rate, 1) for rate in (0.1, 2.0))
    assert busy.tpot_p95 > 1.3 * quiet.tpot_p95
    assert busy.prefill_load > quiet.prefill_load
    assert busy.ttft_p95 > quiet.ttft_p95


def test_what_cannot_keep_up_says_of_what():
    one = stepper("Llama-3.1-8B", "A6000")
    swamped = aggregated(one, RAG, 50.0, 1)
    assert "computing the prompts alone" in swamped.limit
    assert swamped.ttft_p95 == math.inf
    crowded = aggregated(one, WORKLOADS["writing"], 20.0, 1)
    assert f"room for {room(one, WORKLOADS['writing'].context):.0f} sequences" in crowded.limit
    two = disaggregated(one, one, RAG, 50.0, (1, 1))
    assert two.limit.startswith("prefill: ")


def test_a_decode_pool_of_its_own_is_not_delayed_by_prompts():
    one = stepper("Llama-3.1-8B", "H100")
    apart, together = disaggregated(one, one, RAG, 2.0, (1, 1)), aggregated(one, RAG, 2.0, 1)
    assert apart.tpot_p95 < together.tpot_p95
    assert 0 < apart.transfer < 0.1
    assert 0 < apart.link_load < 1


def test_more_replicas_serve_the_same_rate_sooner():
    one = stepper("Llama-3.1-8B", "H100")
    few, many = (aggregated(one, RAG, 2.0, n) for n in (1, 4))
    assert many.ttft_p95 < few.ttft_p95
    assert many.running < few.running


def test_cached_prefixes_are_not_computed_again():
    one = stepper("Llama-3.1-8B", "H100")
    cached = workload("rag", prefix_share=0.9)
    assert aggregated(one, cached, 2.0, 1).ttft_p50 < 0.5 * aggregated(one, RAG, 2.0, 1).ttft_p50


def test_attention_dp_computes_several_prompts_at_once():
    layouts = (Layout(tp=8, ep=8), Layout(dp=8, ep=8))
    whole, parts = (stepper("DeepSeek-V3", "H200", x, weights="fp8-block") for x in layouts)
    assert room(parts, CHAT.context) > room(whole, CHAT.context)
    assert aggregated(whole, CHAT, 60.0, 1).limit
    assert not aggregated(parts, CHAT, 60.0, 1).limit


def test_a_link_that_cannot_carry_the_kv_is_what_bounds_two_pools():
    thin = devices(gpu("H100"), per_host=1, hosts=2, network_gbps=0.5)
    one = stepper("Llama-3.1-8B", "H100", on=thin)
    assert disaggregated(one, one, RAG, 1.0, (1, 1)).limit == "the link cannot carry the KV in time"
    wide = stepper("Llama-3.1-8B", "H100", on=devices(gpu("H100"), per_host=1, hosts=2))
    assert not disaggregated(wide, wide, RAG, 1.0, (1, 1)).limit


def test_kv_that_is_late_delays_the_second_token():
    rates = (2.0, 50.0)
    slow, fast = (
        stepper(
            "Llama-3.1-8B", "H100", on=devices(gpu("H100"), per_host=1, hosts=2, network_gbps=r)
        )
        for r in rates
    )
    late, soon = (disaggregated(one, one, RAG, 0.2, (1, 1)) for one in (slow, fast))
    assert late.transfer == pytest.approx(25 * soon.transfer)
    assert late.tpot_p50 - soon.tpot_p50 == pytest.approx((late.transfer - soon.transfer) / 200)
    assert late.ttft_p95 == soon.ttft_p95, "the first token does not wait for it"


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 20)), min_size=1, max_size=8),
    st.floats(0.05, 0.95),
    st.sampled_from([0.5, 0.95, 0.99]),
)
def test_a_quantile_is_where_that_share_has_its_answer(kinds, load, share):
    services = tuple(Service(share=1 / len(kinds), busy=b, latency=x) for b, x in kinds)
    mean = sum(b for b, _ in kinds) / len(kinds)
    asked = Queue(servers=2, rate=load * 2 / mean, services=services)

    def answered(limit: float) -> float:
        late = (
            1 - asked.waits * math.exp(-(limit - x) / asked.tail) for _, x in kinds if x <= limit
        )
        return sum(late) / len(kinds)

    found = asked.quantile(share)
    assert answered(found * (1 + 1e-9) + 1e-9) >= share - 1e-6
    assert answered(found * (1 - 1e-6) - 1e-6) <= share + 1e-6


def test_room_in_decode_is_kept_from_before_a_prompt_until_its_answer_is_written():
    one = stepper("Llama-3.1-8B", "A6000", length=131_072)
    kind = Requests(prompt=120_000, output=200)
    work, rate = Workload(name="long", kinds=(kind,)), 0.01
    found = disaggregated(one, one, work, rate, (8, 1))
    prompt = one.told.request_s + one.prompt(120_000).total
    kept = prompt + 200 * one.decode(1, work.context).total
    assert int(room(one, work.context)) == 1
    seat = Queue(
        servers=1, rate=rate, services=(Service(share=1.0, busy=kept, latency=0.0),)
    ).quantile(0.95)
    waits = first_tokens(one, work, rate, 8).quantile(0.95)
    assert found.ttft_p95 == pytest.approx(waits + seat, rel=0.01)
