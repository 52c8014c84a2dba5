"""Gaps in buckets: close to what went in, and never more memory than buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.bench.histogram import Histogram

SECONDS = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200)


def histogram(values: list[float]) -> Histogram:
    found = Histogram()
    for value in values:
        found.add(value)
    return found


@given(values=SECONDS, percent=st.sampled_from([0, 50, 90, 95, 99, 100]))
def test_a_percentile_is_within_one_percent_of_the_value_at_its_rank(
    values: list[float], percent: float
):
    exact = np.percentile(values, percent, method="lower")
    assert histogram(values).percentile(percent) == pytest.approx(exact, rel=0.011)


@given(values=SECONDS)
def test_mean_deviation_and_largest_are_exact(values: list[float]):
    found = histogram(values)
    assert found.count == len(values)
    assert found.mean_s == pytest.approx(np.mean(values))
    assert found.std_s == pytest.approx(np.std(values), rel=1e-3, abs=1e-6 * max(values))
    assert found.largest_s == max(values)


@given(first=SECONDS, second=SECONDS)
def test_two_merged_are_one_of_all(first: list[float], second: list[float]):
    merged, whole = histogram(first), histogram(first + second)
    merged.merge(histogram(second))
    assert merged.counts == whole.counts
    assert merged.total_s == pytest.approx(whole.total_s)
    assert merged.largest_s == whole.largest_s


def test_events_of_one_read_are_no_time_apart():
    found = histogram([0.0, 0.0, 0.0, 1.0])
    assert found.percentile(50) == 0.0
    assert found.percentile(100) == pytest.approx(1.0, rel=0.01)


def test_a_million_values_take_no_more_room_than_the_buckets():
    found = Histogram()
    for value in np.geomspace(1e-9, 1e12, 20_000):
        found.add(float(value))
    assert len(found.counts) <= 2801


def test_nothing_has_no_percentile_and_no_mean():
    found = Histogram()
    assert (found.percentile(50), found.mean_s, found.std_s, found.count) == (0, 0, 0, 0)
