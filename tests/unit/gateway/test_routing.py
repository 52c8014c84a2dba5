"""The router's choices, as pure functions of what is known."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ekiden.core.clock import ManualClock
from ekiden.core.hashes import granule_hashes, root_hash
from ekiden.core.types import ReplicaStats
from gateway.bookings import SUSPECT_S, Bookings, Suspects
from gateway.prefix_guess import PrefixGuess
from gateway.routing import Ask, Booked, Candidate, best_rate, order_decode, order_prefill

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
    bookings = Bookings(clock)
    placed: Counter[str] = Counter()
    for _ in range(32):
        pool = [candidate(str(i), booked=bookings.since((str(i), 1), 0)) for i in range(4)]
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


def test_bookings_count_from_the_last_figures_until_released() -> None:
    clock = ManualClock(10)
    bookings = Bookings(clock)
    old = bookings.book(("r", 1), uncached_tokens=5, kv_tokens=7)
    clock.advance(1)
    new = bookings.book(("r", 1), uncached_tokens=50, kv_tokens=70)
    both = Booked(requests=2, uncached_tokens=55, kv_tokens=77)
    assert bookings.since(("r", 1), 10) == both
    assert bookings.since(("r", 1), 10.5) == Booked(requests=1, uncached_tokens=50, kv_tokens=70)
    assert bookings.since(("r", 2), 0) == Booked()
    for booking in (old, new, new):
        bookings.release(booking)
    assert bookings.count == 0


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
