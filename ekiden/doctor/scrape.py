"""What a gateway's ``/metrics`` said, and what changed between two readings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ekiden.core.clock import Clock

Labels = tuple[tuple[str, str], ...]
"""Names and values, in order of name."""


class Scrape(msgspec.Struct, frozen=True, kw_only=True):
    """One reading."""

    at: float
    """Seconds, on the clock of whoever read."""
    samples: dict[str, dict[Labels, float]]
    """By name, as Prometheus shows it (``..._total``, ``..._bucket``)."""

    def of(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """The samples that have ``labels`` among theirs."""
        wanted = labels.items()
        for found, value in self.samples.get(name, {}).items():
            have = dict(found)
            if wanted <= have.items():
                yield have, value

    def total(self, name: str, **labels: str) -> float:
        return math.fsum(value for _, value in self.of(name, **labels))


def read_scrape(text: str, at: float) -> Scrape:
    """Raises ValueError: this is no text exposition."""
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return Scrape(at=at, samples=samples)


async def scrape(http: httpx.AsyncClient, gateway: str, clock: Clock) -> Scrape | str:
    """One reading of the gateway at that URL, or why there is none."""
    try:
        answer = await http.get(f"{gateway}/metrics")
        answer.raise_for_status()
        return read_scrape(answer.text, clock.now())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return str(error).partition("\n")[0] or type(error).__name__


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """From one reading of a gateway to a later one of the same gateway.

    A counter that has fallen was begun anew: all of it is new then.
    """

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    def added(self, name: str, **labels: str) -> float:
        """By how much the counters ``name`` with ``labels`` have grown together."""
        return math.fsum(value for _, value in self._grown(name, **labels))

    def rate(self, name: str, **labels: str) -> float:
        """A second; 0 where no time has passed."""
        return self.added(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def by(self, name: str, label: str, **labels: str) -> Counter[str]:
        """What was added, by the value of ``label``; what has not grown is left out."""
        found: Counter[str] = Counter()
        for have, value in self._grown(name, **labels):
            if value:
                found[have[label]] += value  # type: ignore[assignment]
        return found

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """Of the histogram ``name`` (without ``_bucket``): evenly spread within a bucket, as
        Prometheus has it. None: nothing was observed. What lies beyond the last bucket has its
        bound."""
        buckets: Counter[float] = Counter()
        for have, value in self._grown(f"{name}_bucket", **labels):
            buckets[float(have["le"])] += value  # type: ignore[assignment]
        return _quantile(sorted(buckets.items()), share)

    def _grown(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        earlier = self.before.samples.get(name, {})
        for have, value in self.after.of(name, **labels):
            known = earlier.get(tuple(sorted(have.items())), 0.0)
            yield have, value - known if value >= known else value


def _quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """``buckets``: (upper bound, how many are at or below it), the last one of all."""
    if not buckets or not buckets[-1][1]:
        return None
    wanted = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for upper, count in buckets:
        if count >= wanted and count > below:
            if math.isinf(upper):
                return lower
            return lower + (upper - lower) * (wanted - below) / (count - below)
        lower, below = upper, count
    return lower
