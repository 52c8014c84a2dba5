"""How values are spread, and what they are a second."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

POINTS = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
"""The percentiles of a spread, by field."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How values are spread. Percentiles are linear between ranks, as numpy's are."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def spread(values: Iterable[float]) -> Spread:
    """All zeros of nothing."""
    found = np.fromiter(values, dtype=np.float64)
    if not found.size:
        return Spread()
    points = np.percentile(found, list(POINTS.values()))
    return Spread(
        count=found.size,
        mean=float(found.mean()),
        std=float(found.std()),
        min=float(found.min()),
        max=float(found.max()),
        **dict(zip(POINTS, map(float, points), strict=True)),
    )


def ms(seconds: Iterable[float]) -> Spread:
    """Of seconds, in milliseconds."""
    return spread(1000 * value for value in seconds)


def rate(count: float, passed: float) -> float:
    """A second; 0 where no time has passed."""
    return count / passed if passed > 0 else 0.0
