"""Where a value lies on a chart, and which values are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

TICKS = 5
_ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """From values to pixels. ``log``: equal steps are equal ratios, and ``low`` is above 0."""

    low: float
    high: float
    start: float
    """The pixel of ``low``."""
    end: float
    log: bool = False
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        low, high, here = (self._scale(v) for v in (self.low, self.high, value))
        share = (here - low) / ((high - low) or 1)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def _scale(self, value: float) -> float:
        return math.log(max(value, 1e-12)) if self.log else value


def from_zero(values: Iterable[float], start: float, end: float, *, whole: bool = False) -> Axis:
    """From 0 to a round number no less than all values; ``whole``: no tick between two numbers."""
    step = _round_up(max(values, default=0.0) / TICKS or 1.0)
    step = math.ceil(step) if whole else step
    ticks = tuple(step * number for number in range(TICKS + 1))
    return Axis(low=0.0, high=ticks[-1], start=start, end=end, ticks=ticks)


def through(values: Iterable[float], start: float, end: float, *, log: bool | None = None) -> Axis:
    """A tick at each value, with room at both ends. ``log``: by ratio; by default where the largest
    is 8 times the smallest or more. By ratio all values are above 0."""
    found = sorted(set(values))
    if log is None:
        log = found[0] > 0 and found[-1] >= 8 * found[0]
    room = 0.04 * (end - start)
    return Axis(
        low=found[0],
        high=found[-1],
        start=start + room,
        end=end - room,
        log=log,
        ticks=tuple(found),
    )


def by_decades(low: float, high: float, start: float, end: float) -> Axis:
    """By ratio, with ticks at 1, 2 and 5 of each decade, or at round steps where fewer than two of
    those lie between; ``low`` is above 0."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = (m * 10.0**power for power in range(first, last + 1) for m in (1, 2, 5))
    inside = tuple(tick for tick in ticks if low <= tick <= high)
    if len(inside) < 2:
        inside = _steps(low, high)
    return Axis(low=low, high=high, start=start, end=end, log=True, ticks=inside)


def _steps(low: float, high: float) -> tuple[float, ...]:
    """Multiples of a round number between two values, or the value where they are one."""
    if high <= low:
        return (low,)
    step = _round_up((high - low) / TICKS)
    return tuple(step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1))


def _round_up(value: float) -> float:
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * m for m in _ROUND if unit * m >= value * (1 - 1e-9))
