"""How tokens fall on the experts of a mixture, and on the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Balancedness(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a mean rank over those of the busiest one, a step: 1 is even. Half of the steps,
    95 of 100, and all have as much or more."""

    p50: float = 1.0
    p95: float = 1.0
    worst: float = 1.0


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Of the replicas of one role."""

    steps: int
    tokens: list[list[int]]
    """Of each expert, by layer: those that took it. Not every layer need be told."""
    balancedness: Balancedness
    dispatch_share: float
    """Of the steps: what a mean rank is in dispatch and combine, its wait for the busiest rank
    included."""


def balancedness(steps: Sequence[float]) -> Balancedness:
    """Of the values of single steps; even where there are none."""
    if not steps:
        return Balancedness()
    half, most = np.percentile(np.array(steps), (50, 5))
    return Balancedness(p50=float(half), p95=float(most), worst=min(steps))
