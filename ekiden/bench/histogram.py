"""Durations in buckets: as much memory for a million as for ten, and two of them add up."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

LEAST_S = 1e-6
GROWTH = 1.01
"""Of a bucket's bounds: what is read from a bucket is within 0.5 % of what went in."""
_LOG_GROWTH = math.log(GROWTH)
_LAST = 2800
"""Ends beyond a fortnight."""


class Histogram(msgspec.Struct):
    """Seconds. Bucket 0 holds all below a microsecond: events of one and the same read."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    total_s: float = 0.0
    squares: float = 0.0
    largest_s: float = 0.0

    def add(self, seconds: float) -> None:
        bucket = _bucket(seconds)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total_s += seconds
        self.squares += seconds * seconds
        self.largest_s = max(self.largest_s, seconds)

    def merge(self, other: Histogram) -> None:
        self.counts = dict(Counter(self.counts) + Counter(other.counts))
        self.total_s += other.total_s
        self.squares += other.squares
        self.largest_s = max(self.largest_s, other.largest_s)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.counts else 0.0

    @property
    def std_s(self) -> float:
        if not self.counts:
            return 0.0
        return math.sqrt(max(0.0, self.squares / self.count - self.mean_s**2))

    def percentile(self, percent: float) -> float:
        """Seconds that ``percent`` % of what was added do not exceed; 0 of nothing."""
        rank, seen = percent / 100 * max(0, self.count - 1), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen > rank:
                return min(middle(bucket), self.largest_s)
        return self.largest_s


def middle(bucket: int) -> float:
    """The duration that a bucket stands for, in seconds."""
    return LEAST_S * GROWTH ** (bucket - 0.5) if bucket else 0.0


def _bucket(seconds: float) -> int:
    if seconds < LEAST_S:
        return 0
    return min(_LAST, 1 + int(math.log(seconds / LEAST_S) / _LOG_GROWTH))
