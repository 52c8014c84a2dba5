"""Waiting for another process through shared memory: spin, then yield, then sleep, then give up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ekiden.core.clock import Clock, MonotonicClock

_SPINS = 100
_YIELD_S = 0.001
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 200e-6


class Patience:
    """How long to wait and how hard. Ranks may outnumber cores, so nobody spins for long."""

    def __init__(
        self,
        timeout_s: float,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.timeout_s = timeout_s
        self._clock = clock or MonotonicClock()
        self._sleep = sleep

    def until(self, ready: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Whether ``ready`` came true in time. ``check`` runs between naps and may raise."""
        for _ in range(_SPINS):
            if ready():
                return True
        start = self._clock.now()
        while self._clock.now() - start < _YIELD_S:
            os.sched_yield()
            self._sleep(0)  # lets go of the GIL: this process has a transport thread as well
            if ready():
                return True
        return self._nap(ready, check, start + self.timeout_s)

    def _nap(self, ready: Callable[[], bool], check: Callable[[], None], deadline: float) -> bool:
        nap = _FIRST_NAP_S
        while not ready():
            check()
            if self._clock.now() >= deadline:
                return ready()
            self._sleep(nap)
            nap = min(2 * nap, _LAST_NAP_S)
        return True
