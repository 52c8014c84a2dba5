"""Time of a simulation: callbacks in order of their moments."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Call = Callable[[], object]


class Loop:
    """A ``Clock`` in seconds from 0. Calls of one moment run in the order in which they were asked
    for, so that a run depends on its input alone."""

    def __init__(self) -> None:
        self._now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._numbers = count()

    def now(self) -> float:
        return self._now

    def at(self, moment: float, call: Call) -> None:
        """Have ``call`` made at ``moment``, or now if that is over."""
        heapq.heappush(self._calls, (max(moment, self._now), next(self._numbers), call))

    def after(self, seconds: float, call: Call) -> None:
        self.at(self._now + seconds, call)

    def run(self, over: Callable[[], bool]) -> None:
        """Make calls until ``over`` or none is left."""
        while self._calls and not over():
            self._now, _, call = heapq.heappop(self._calls)
            call()
