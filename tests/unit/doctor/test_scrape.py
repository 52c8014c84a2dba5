"""Rates, shares and quantiles between two readings of a gateway."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ekiden.doctor.scrape import Interval, read_scrape

BOUNDS = (0.1, 0.2, 0.5, 1.0)


class Gateway:
    """Metrics as a gateway keeps them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sources = Counter("ekiden_sources", "-", ("model", "source"), registry=self.registry)
        self.ttft = Histogram(
            "ekiden_ttft_seconds", "-", ("model",), buckets=BOUNDS, registry=self.registry
        )
        self.held = Gauge("ekiden_held", "-", ("replica",), registry=self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def between(before: str, after: str, seconds: float = 2.0) -> Interval:
    return Interval(before=read_scrape(before, 10.0), after=read_scrape(after, 10.0 + seconds))


def test_a_rate_is_what_was_added_a_second_and_not_what_there_is() -> None:
    gateway = Gateway()
    gateway.sources.labels("m", "cache").inc(100)
    before = gateway.text()
    gateway.sources.labels("m", "cache").inc(6)
    gateway.sources.labels("n", "computed").inc(4)
    found = between(before, gateway.text())
    assert found.rate("ekiden_sources_total") == 5.0
    assert found.rate("ekiden_sources_total", model="m") == 3.0
    assert found.by("ekiden_sources_total", "source") == {"cache": 6.0, "computed": 4.0}
    assert found.by("ekiden_sources_total", "source", model="n") == {"computed": 4.0}
    assert found.rate("ekiden_nothing_total") == 0.0


def test_a_gateway_that_began_anew_has_no_negative_rates() -> None:
    old, new = Gateway(), Gateway()
    old.sources.labels("m", "cache").inc(1000)
    new.sources.labels("m", "cache").inc(8)
    assert between(old.text(), new.text()).rate("ekiden_sources_total") == 4.0


def test_no_time_between_two_readings_is_no_rate() -> None:
    text = Gateway().text()
    assert between(text, text, 0.0).rate("ekiden_sources_total") == 0.0


def test_a_gauge_is_what_it_was_last() -> None:
    gateway = Gateway()
    gateway.held.labels("a").set(3)
    gateway.held.labels("b").set(4)
    scrape = read_scrape(gateway.text(), 0.0)
    assert scrape.total("ekiden_held") == 7.0
    assert [(have["replica"], value) for have, value in scrape.of("ekiden_held", replica="b")] == [
        ("b", 4.0)
    ]


@given(
    old=st.lists(st.floats(0, 0.99)),
    new=st.lists(st.floats(0.001, 0.99), min_size=1),
    share=st.floats(0.01, 0.99),
)
def test_a_quantile_is_in_the_bucket_of_the_observation_that_has_that_rank(
    old: list[float], new: list[float], share: float
) -> None:
    gateway = Gateway()
    for seconds in old:
        gateway.ttft.labels("m").observe(seconds)
    before = gateway.text()
    for seconds in new:
        gateway.ttft.labels("m").observe(seconds)
    found = between(before, gateway.text()).quantile("ekiden_ttft_seconds", share)
    # Within rounding the rank may fall on either neighbour.
    ranks = {math.ceil(share * len(new) * scale) for scale in (1 - 1e-9, 1 + 1e-9)}
    edges = [0.0, *BOUNDS]
    held = [sorted(new)[min(max(rank, 1), len(new)) - 1] for rank in ranks]
    lows = [max(edge for edge in edges if edge < value) for value in held]
    highs = [min(edge for edge in edges if edge >= value) for value in held]
    assert found is not None
    assert min(lows) - 1e-9 <= found <= max(highs) + 1e-9


def test_quantiles_of_nothing_and_beyond_the_last_bucket() -> None:
    gateway = Gateway()
    gateway.ttft.labels("m").observe(0.3)
    before = gateway.text()
    assert between(before, before).quantile("ekiden_ttft_seconds", 0.5) is None
    gateway.ttft.labels("m").observe(30)
    assert between(before, gateway.text()).quantile("ekiden_ttft_seconds", 0.5) == 1.0


def test_what_is_no_metrics_is_refused() -> None:
    with pytest.raises(ValueError):
        read_scrape("<html>nothing here</html>", 0.0)
