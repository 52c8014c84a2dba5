"""Every request ends exactly once, whatever happens, and the block books balance."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from sim_worlds import check_books, moments, requests, run, scenario, stepper

from ekiden.sim.asked import Asked
from ekiden.sim.record import DISCONNECTED
from ekiden.sim.scenario import Kill

FEW_BLOCKS = 160
"""Of 16 tokens: 2,560 tokens, so that requests wait for room and are preempted."""

workloads = st.lists(
    st.builds(
        lambda gap, prompt, output, head: (gap, prompt, output, head),
        st.floats(0, 0.2),
        st.integers(1, 1500),
        st.integers(1, 400),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=25,
)


def asked_of(rows: list[tuple[float, int, int, int]]) -> list[Asked]:
    """Prompts share the block ``head`` at their beginning, and go on alone."""
    due, found = 0.0, []
    for number, (gap, prompt, output, head) in enumerate(rows):
        due += gap
        ids = (head, 1000 + number, 2000 + number)[: -(-prompt // 512)]
        found.append(Asked(number=number, due_s=due, prompt=prompt, output=output, ids=ids))
    return found


@settings(max_examples=40, deadline=None)
@given(rows=workloads, prefill=st.integers(0, 2), decode=st.integers(1, 3), seed=st.integers(0, 9))
def test_every_request_ends_once_and_no_block_is_left(
    rows: list[tuple[float, int, int, int]], prefill: int, decode: int, seed: int
) -> None:
    asked = asked_of(rows)
    world = run(scenario(prefill, decode, blocks=FEW_BLOCKS, seed=seed), asked)
    assert sorted(row.asked.number for row in world.front.records) == list(range(len(asked)))
    for row in world.front.records:
        assert row.ok
        assert row.asked.due_s < row.ttft_s + row.asked.due_s
        assert row.first_s is not None
        assert row.ended_s is not None
        assert row.first_s <= row.ended_s
        sources = (row.decode_cache, row.prefill_cache, row.prefill_computed, row.local_computed)
        assert sum(sources) == row.asked.prompt
        assert min(sources) >= 0
    check_books(world)


@settings(max_examples=40, deadline=None)
@given(
    rows=workloads,
    kills=st.lists(
        st.builds(
            Kill,
            at_s=st.floats(0, 3),
            role=st.sampled_from(("prefill", "decode")),
            number=st.integers(0, 1),
        ),
        max_size=4,
    ),
)
def test_deaths_lose_no_request_and_no_block(
    rows: list[tuple[float, int, int, int]], kills: list[Kill]
) -> None:
    asked = asked_of(rows)
    world = run(scenario(2, 2, blocks=FEW_BLOCKS, kills=tuple(kills), mttr_s=1.0), asked)
    assert sorted(row.asked.number for row in world.front.records) == list(range(len(asked)))
    assert all(row.ended_s is not None for row in world.front.records)
    check_books(world)


@settings(max_examples=40, deadline=None)
@given(rows=workloads, prefill=st.integers(0, 1), blocks=st.sampled_from((FEW_BLOCKS, 4000)))
def test_strides_change_nothing(
    rows: list[tuple[float, int, int, int]], prefill: int, blocks: int
) -> None:
    asked = asked_of(rows)
    quick, slow = (
        run(scenario(prefill, 2, blocks=blocks, strides=strides), asked)
        for strides in (True, False)
    )
    assert moments(quick.front.records) == moments(slow.front.records)
    for one, other in zip(quick.outcome().spans, slow.outcome().spans, strict=True):
        assert one.sampled_tokens == other.sampled_tokens
        assert abs(one.busy_s - other.busy_s) < 1e-9


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    asked = requests(40, every_s=0.05)
    first, again, other = (run(scenario(2, 4, seed=seed), asked) for seed in (1, 1, 2))
    assert moments(first.front.records) == moments(again.front.records)
    assert moments(first.front.records) != moments(other.front.records)


def test_a_request_that_outlives_its_deadline_fails_and_leaves_nothing_behind() -> None:
    world = run(scenario(1, 1, timeout_s=0.5), requests(30, every_s=0.01, prompt=4000))
    errors = {row.error for row in world.front.records}
    assert "timeout" in errors
    check_books(world)


def test_a_decode_replica_that_dies_ends_the_streams_that_had_begun_and_only_those() -> None:
    asked = requests(12, every_s=0.2, prompt=3000, output=200)
    world = run(scenario(1, 2, kills=(Kill(at_s=2.0, role="decode"),), mttr_s=1e4), asked)
    broken = [row for row in world.front.records if not row.ok]
    assert broken
    assert all(row.error == DISCONNECTED for row in broken)
    assert all(row.first_s is not None and row.first_s < 2.01 for row in broken)
    assert all(row.decode_replica == "decode-0" for row in broken)
    check_books(world)


def test_a_prefill_replica_that_dies_costs_time_and_no_request() -> None:
    asked = requests(20, every_s=0.05, prompt=6000)
    world = run(scenario(2, 2, kills=(Kill(at_s=0.6, role="prefill"),), mttr_s=1e4), asked)
    assert all(row.ok for row in world.front.records)
    retried = [row for row in world.front.records if row.fallbacks]
    assert {"prefill_retry"} <= {kind for row in retried for kind in row.fallbacks}
    check_books(world)


def test_without_prefill_replicas_that_live_decode_prefills_by_itself() -> None:
    asked = requests(6, every_s=0.5)
    world = run(scenario(1, 1, kills=(Kill(at_s=0.7, role="prefill"),), mttr_s=1e4), asked)
    late = [row for row in world.front.records if row.asked.due_s > 0.8]
    assert all(row.ok and row.local_computed for row in late)


def test_what_the_client_has_seen_binds_where_its_kv_never_comes() -> None:
    slow = stepper(network_gbps=0.2)
    death = Kill(at_s=0.5, role="prefill")
    world = run(scenario(1, 1, stepper=slow, kills=(death,), mttr_s=1e4), requests(1, prompt=4000))
    (row,) = world.front.records
    assert row.first_s is not None
    assert row.first_s < 0.5
    assert row.fallbacks == ["recompute"]
    assert row.ok
    assert row.local_computed == 4000
    decode = next(span for span in world.outcome().spans if span.role == "decode")
    assert decode.sampled_tokens == 19
    check_books(world)


def test_a_prompt_waits_until_decode_has_room_for_it() -> None:
    """Prefill never computes what has nowhere to go."""
    asked = requests(3, every_s=0.01, prompt=1500, output=100)
    world = run(scenario(1, 1, blocks=120), asked)
    rows = world.front.records
    for earlier, later in pairwise(rows):
        assert later.started_s is not None
        assert earlier.ended_s is not None
        assert earlier.ended_s - 0.01 < later.started_s < earlier.ended_s + 0.01
    assert not any(row.fallbacks for row in rows)
