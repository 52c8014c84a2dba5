"""The router's choices, as pure functions of what is known."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ekiden.core.clock import ManualClock
from ekiden.core.hashes import granule_hashes, root_hash
from ekiden.core.types import ReplicaStats
from gateway.bookings import SUSPECT_S, Bookings, Suspects
from gateway.prefix_guess import PrefixGuess
from gateway.routing import (
    Ask,
    Booked,
    Candidate,
    Told,
    best_rate,
    order_decode,
    order_prefill,
    requests_at,
)

ASK = Ask(prompt=1000, max_output=100)


def candidate(name: str, *, booked: Booked | None = None, **known: object) -> Candidate:
    fields = {k: v for k, v in known.items() if k in ("cached_tokens", "suspect")}
    stats = ReplicaStats(**{k: v for k, v in known.items() if k not in fields})  # type: ignore[arg-type]
    return Candidate(
        id=name, epoch=1, block_size=16, stats=stats, booked=booked or Booked(), **fields
    )


def best_prefill(*pool: Candidate, ask: Ask = ASK) -> str:
    return order_prefill(pool, ask, random.Random(1))[0].candidate.id


def best_decode(*pool: Candidate, ask: Ask = ASK) -> str:
    return order_decode(pool, ask, random.Random(1))[0].candidate.id


def test_ties_break_at_random() -> None:
    rng = random.Random(5)
    pool = [candidate(str(i)) for i in range(4)]
    wins = Counter(order_prefill(pool, ASK, rng)[0].candidate.id for _ in range(400))
    assert all(60 < wins[str(i)] < 140 for i in range(4))


def test_a_burst_on_idle_replicas_is_dealt_evenly() -> None:
    clock, rng = ManualClock(), random.Random(3)
    bookings, told = Bookings(clock), Told(0, 0)
    placed: Counter[str] = Counter()
    for _ in range(32):
        pool = [candidate(str(i), booked=bookings.known((str(i), 1), told)) for i in range(4)]
        name = order_decode(pool, ASK, rng)[0].candidate.id
        bookings.book((name, 1), uncached_tokens=0, kv_tokens=1100)
        placed[name] += 1
    assert set(placed.values()) == {8}


def test_prefill_load_is_tokens_not_requests() -> None:
    many_short = candidate("short", waiting=20, waiting_tokens=1000)
    one_long = candidate("long", waiting=1, waiting_tokens=20000)
    assert best_prefill(many_short, one_long) == "short"


def test_prefill_speed_counts() -> None:
    fast = candidate("fast", waiting_tokens=3000, prefill_tokens_per_s=4000.0)
    slow = candidate("slow", waiting_tokens=0, prefill_tokens_per_s=500.0)
    assert best_prefill(fast, slow) == "fast"


def test_a_cached_prefix_draws_a_request_until_the_queue_costs_more() -> None:
    def against(queue: int) -> str:
        cached = candidate("cached", cached_tokens=800, waiting_tokens=queue)
        return best_prefill(cached, candidate("empty"))

    assert against(queue=700) == "cached"
    assert against(queue=900) == "empty"


def test_a_new_replica_is_tried_although_nothing_is_measured_yet() -> None:
    busy = candidate("busy", waiting_tokens=10, prefill_tokens_per_s=2000.0, running=1, step_s=0.01)
    assert best_prefill(busy, candidate("new")) == "new"
    assert best_decode(busy, candidate("new")) == "new"


def test_an_idle_replica_whose_last_step_was_slow_is_chosen_again() -> None:
    was_full = candidate("idle", running=0, step_s=0.5)
    assert best_decode(was_full, candidate("busy", running=3, step_s=0.05)) == "idle"


def test_decode_avoids_a_pool_without_room() -> None:
    full = candidate("full", running=1, step_s=0.007, kv_blocks_total=100, kv_blocks_held=95)
    roomy = candidate("roomy", running=3, step_s=0.01, kv_blocks_total=100, kv_blocks_held=5)
    assert best_decode(full, roomy) == "roomy"
    assert best_decode(full, roomy, ask=Ask(prompt=16, max_output=16)) == "full"


def test_a_suspect_is_last_whatever_its_cache_and_is_better_than_nothing() -> None:
    suspect = candidate("hot", cached_tokens=1000, suspect=True)
    assert best_prefill(suspect, candidate("cold", waiting_tokens=9999)) == "cold"
    assert best_prefill(suspect) == "hot"


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 1000), st.floats(0, 1)),
        min_size=1,
        max_size=6,
    )
)
def test_every_candidate_is_ordered_once_by_its_time(
    loads: list[tuple[int, int, float]],
) -> None:
    pool = [
        candidate(str(i), waiting_tokens=tokens, running=running, step_s=step)
        for i, (tokens, running, step) in enumerate(loads)
    ]
    for order in (
        order_prefill(pool, ASK, random.Random(0)),
        order_decode(pool, ASK, random.Random(0)),
    ):
        assert sorted(scored.candidate.id for scored in order) == sorted(c.id for c in pool)
        times = [scored.seconds for scored in order]
        assert times == sorted(times)
    assert best_rate(pool) == 0


LIFE = ("r", 1)


def test_a_booking_counts_until_it_is_released_and_its_prompt_until_it_is_computed() -> None:
    clock = ManualClock(10)
    bookings, told = Bookings(clock), Told(0, 0)
    first = bookings.book(LIFE, uncached_tokens=5, kv_tokens=7)
    second = bookings.book(LIFE, uncached_tokens=50, kv_tokens=70)
    found = bookings.known(LIFE, told)
    assert (found.requests, found.uncached_tokens, found.kv_tokens) == (2, 55, 77)
    bookings.computed(first)
    found = bookings.known(LIFE, told)
    assert (found.requests, found.uncached_tokens, found.kv_tokens) == (2, 50, 77)
    assert bookings.known(("r", 2), told) == Booked()
    for booking in (first, second, second):
        bookings.release(booking)
    assert bookings.known(LIFE, told) == Booked()
    assert bookings.count == 0
    clock.advance(1)
    bookings.known(LIFE, told)
    assert LIFE not in bookings


def test_what_the_figures_may_count_of_ours_is_told_apart_from_what_came_later() -> None:
    clock = ManualClock(10)
    bookings = Bookings(clock)
    old = bookings.book(LIFE, uncached_tokens=5, kv_tokens=7)
    ended = bookings.book(LIFE, uncached_tokens=3, kv_tokens=4)

    def counted(earliest: float, latest: float) -> tuple[int, int, int]:
        found = bookings.known(LIFE, Told(earliest, latest))
        return found.counted_requests, found.counted_tokens, found.kv_tokens

    assert counted(9.5, 9.75) == (0, 0, 11)
    clock.advance(1)
    bookings.release(ended)
    clock.advance(1)
    bookings.book(LIFE, uncached_tokens=50, kv_tokens=70)
    assert counted(10.5, 10.75) == (2, 8, 70)
    bookings.computed(old)
    assert counted(10.5, 10.75) == (2, 8, 70)
    assert counted(11.5, 11.75) == (1, 5, 70)
    assert counted(12.5, 12.75) == (2, 50, 0)


def test_a_prompt_that_another_replica_computes_is_in_the_batch_from_its_first_token() -> None:
    clock = ManualClock(10)
    bookings = Bookings(clock)
    booking = bookings.book(LIFE, uncached_tokens=0, kv_tokens=7)
    clock.advance(1)
    assert bookings.known(LIFE, Told(10.5, 10.75)).counted_requests == 0
    bookings.computed(booking)
    clock.advance(1)
    assert bookings.known(LIFE, Told(11.5, 11.75)).counted_requests == 1


def test_the_oldest_prompt_is_the_one_in_work_since_the_one_before_it_was_done() -> None:
    clock = ManualClock(10)
    bookings, told = Bookings(clock), Told(0, 0)
    first, second = (bookings.book(LIFE, uncached_tokens=n, kv_tokens=0) for n in (100, 200))
    clock.advance(2)
    found = bookings.known(LIFE, told)
    assert (found.computing_tokens, found.computing_s) == (100, 2)
    bookings.release(first)
    clock.advance(0.5)
    found = bookings.known(LIFE, told)
    assert (found.computing_tokens, found.computing_s) == (200, 0.5)
    bookings.computed(second)
    assert bookings.known(LIFE, told).computing_tokens == 0


def test_what_ended_while_figures_were_on_their_way_is_still_known_as_ours() -> None:
    """They were made while its prompt was waiting, and are read when it is done."""
    clock = ManualClock(10)
    bookings, old = Bookings(clock), Told(9, 9.25)
    booking = bookings.book(LIFE, uncached_tokens=8000, kv_tokens=1)
    clock.advance(1)
    bookings.release(booking)
    clock.advance(0.1)
    assert bookings.known(LIFE, old) == Booked()
    assert bookings.known(LIFE, Told(10.85, 11.1)).counted_tokens == 8000


def test_bookings_that_ended_are_forgotten_even_while_figures_stand_still() -> None:
    """Redis is away: for hours the same figures are all there is."""
    clock = ManualClock(10)
    bookings, told = Bookings(clock), Told(9, 9.25)
    for _ in range(100):
        clock.advance(0.1)
        bookings.release(bookings.book(LIFE, uncached_tokens=1, kv_tokens=1))
        bookings.known(LIFE, told)
    assert len(bookings._held[LIFE].bookings) < 5
    clock.advance(1)
    bookings.known(LIFE, told)
    assert LIFE not in bookings
    kept = bookings.book(LIFE, uncached_tokens=1, kv_tokens=1)
    bookings.keep_only(set())
    assert LIFE not in bookings
    bookings.release(kept)


def test_our_requests_in_old_figures_do_not_count_twice() -> None:
    done = Booked(counted_requests=3, counted_tokens=9000)
    stale = candidate("stale", running=2, waiting=1, waiting_tokens=9000, booked=done)
    assert best_prefill(stale, candidate("busy", waiting_tokens=500)) == "stale"
    assert requests_at(stale) == 0
    waits = Booked(requests=1, uncached_tokens=700, counted_requests=3, counted_tokens=9000)
    still = candidate("still", running=2, waiting=1, waiting_tokens=9000, booked=waits)
    assert best_prefill(still, candidate("busy", waiting_tokens=500)) == "busy"
    assert requests_at(still) == 1


def test_what_others_sent_counts_beside_ours() -> None:
    ours = Booked(requests=1, uncached_tokens=1000, counted_requests=1, counted_tokens=1000)
    shared = candidate("shared", waiting=4, waiting_tokens=4000, booked=ours)
    assert requests_at(shared) == 4
    assert best_prefill(shared, candidate("other", waiting_tokens=3900)) == "other"
    assert best_prefill(shared, candidate("other", waiting_tokens=4100)) == "shared"


def test_a_prompt_in_work_weighs_less_the_longer_it_was_but_never_nothing() -> None:
    def working(seconds: float) -> Candidate:
        booked = Booked(
            requests=1, uncached_tokens=8000, computing_tokens=8000, computing_s=seconds
        )
        return candidate("working", prefill_tokens_per_s=8000.0, booked=booked)

    other = candidate("other", prefill_tokens_per_s=8000.0, waiting_tokens=2000)
    idle = candidate("idle", prefill_tokens_per_s=8000.0)
    assert best_prefill(working(1.0), other) == "other"
    assert best_prefill(working(1.5), other) == "working"
    assert best_prefill(working(10.0), idle) == "idle"


def test_what_figures_have_of_others_is_computed_as_they_grow_old() -> None:
    def waiting(age_s: float) -> Candidate:
        known = candidate("waiting", prefill_tokens_per_s=1000.0, waiting_tokens=3000)
        return msgspec.structs.replace(known, age_s=age_s)

    other = candidate("other", prefill_tokens_per_s=1000.0, waiting_tokens=1000)
    assert best_prefill(waiting(1.0), other) == "other"
    assert best_prefill(waiting(3.0), other) == "waiting"


def test_speeds_that_are_about_equal_are_taken_for_equal() -> None:
    """What they differ by is the work that they were measured with."""
    slower = candidate("slower", prefill_tokens_per_s=9000.0)
    faster = candidate("faster", prefill_tokens_per_s=10_000.0, waiting_tokens=100)
    assert best_prefill(slower, faster) == "slower"
    far = candidate("far", prefill_tokens_per_s=3000.0)
    assert best_prefill(far, faster) == "faster"


def test_a_small_batch_is_quicker_to_join_than_a_large_one() -> None:
    """Of equal machines: the step of the large one was measured with its rows."""
    large = candidate("large", running=12, step_s=0.0112)
    assert best_decode(candidate("small", running=1, step_s=0.0101), large) == "small"


def test_a_suspect_is_forgiven_in_time_or_when_it_works() -> None:
    clock = ManualClock()
    suspects = Suspects(clock)
    life = ("r", 1)
    suspects.failed(life)
    suspects.failed(life)
    assert life not in suspects
    suspects.failed(life)
    assert life in suspects
    clock.advance(SUSPECT_S)
    assert life not in suspects
    suspects.failed(life, certain=True)
    assert life in suspects
    suspects.worked(life)
    assert life not in suspects


def granules(*prompt: int) -> list[bytes]:
    return granule_hashes(root_hash("m"), [token for token in prompt for _ in range(16)])


def test_the_guess_knows_the_common_head_of_what_was_routed_to_this_life_only() -> None:
    guess = PrefixGuess()
    guess.add(("a", 1), granules(1, 2, 3))
    assert guess.cached(("a", 1), granules(1, 2, 3, 4)) == 3
    assert guess.cached(("a", 1), granules(1, 2, 9, 9)) == 2
    assert guess.cached(("a", 1), granules(2, 3)) == 0
    assert guess.cached(("a", 2), granules(1, 2, 3)) == 0
    guess.keep_only({("b", 1)})
    assert guess.cached(("a", 1), granules(1)) == 0


@given(prompts=st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=20))
def test_the_guess_is_bounded_and_always_a_head(prompts: list[list[int]]) -> None:
    guess = PrefixGuess(max_granules=10)
    for prompt in prompts:
        guess.add(("a", 1), granules(*prompt), capacity=6)
    seen = guess._seen.get(("a", 1), {})
    assert len(seen) <= 6
    if prompts:
        assert guess.cached(("a", 1), granules(*prompts[-1])) == min(6, len(prompts[-1]))
