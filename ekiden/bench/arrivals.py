"""When requests of an open loop are due: seconds from the start, whether or not answers came."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

ARRIVALS = ("poisson", "constant", "burst")


def arrivals(kind: str, rate: float, *, burst: int = 1, seed: int = 0) -> Iterator[float]:
    """Moments without end, ``rate`` of them a second on average; ``inf``: all at 0.

    ``poisson``: gaps are exponential, as of many users who know nothing of one another.
    ``constant``: all gaps are equal. ``burst``: ``burst`` requests at once, then none for
    ``burst / rate`` seconds.
    """
    if math.isinf(rate):
        return itertools.repeat(0.0)
    match kind:
        case "poisson":
            chance = random.Random(f"{seed}/arrivals")
            return itertools.accumulate(chance.expovariate(rate) for _ in itertools.count())
        case "constant":
            return (number / rate for number in itertools.count())
        case _:
            return (number // burst * burst / rate for number in itertools.count())


def schedule(moments: Iterator[float], *, count: int, duration_s: float) -> list[float]:
    """The first ``count`` moments, those before ``duration_s``, or what meets both; 0: no limit."""
    limited = itertools.islice(moments, count or None)
    if not duration_s:
        return list(limited)
    return list(itertools.takewhile(lambda moment: moment < duration_s, limited))
