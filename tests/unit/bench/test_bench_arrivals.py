"""When requests of an open loop are due."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.bench.arrivals import ARRIVALS, arrivals, schedule

RATES = st.floats(0.01, 1000)


def gaps(kind: str, rate: float, count: int, **options: int) -> list[float]:
    moments = list(itertools.islice(arrivals(kind, rate, **options), count))
    return [b - a for a, b in itertools.pairwise(moments)]


@given(rate=RATES, kind=st.sampled_from(ARRIVALS))
def test_moments_never_go_back_and_keep_the_rate(rate: float, kind: str):
    found = gaps(kind, rate, 2001, burst=5)
    assert min(found) >= 0
    assert sum(found) == pytest.approx(2000 / rate, rel=0.1)


def test_gaps_of_poisson_arrivals_are_exponential():
    found = np.array(gaps("poisson", 2.0, 20_000))
    assert found.std() == pytest.approx(found.mean(), rel=0.03)
    assert (found > 1.0).mean() == pytest.approx(math.exp(-2), abs=0.01)


@given(rate=RATES)
def test_gaps_of_constant_arrivals_are_equal(rate: float):
    assert gaps("constant", rate, 50) == pytest.approx([1 / rate] * 49)


def test_a_burst_comes_at_once_and_the_next_when_the_rate_allows():
    moments = list(itertools.islice(arrivals("burst", 2.0, burst=4), 12))
    assert Counter(moments) == {0.0: 4, 2.0: 4, 4.0: 4}


def test_a_rate_without_end_sends_all_at_once():
    assert set(itertools.islice(arrivals("poisson", math.inf), 9)) == {0.0}


def test_one_seed_gives_one_schedule_and_another_seed_another():
    first, same, other = (gaps("poisson", 1.0, 9, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first != other


@pytest.mark.parametrize(
    ("count", "duration", "expected"),
    [(3, 0.0, 3), (0, 1.0, 10), (3, 1.0, 3), (99, 1.0, 10)],
)
def test_a_schedule_ends_by_number_or_by_time(count: int, duration: float, expected: int):
    moments = arrivals("constant", 10.0)
    assert len(schedule(moments, count=count, duration_s=duration)) == expected
