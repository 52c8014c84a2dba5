"""Values over values: lines, outlines of a distribution, and a run as time passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ekiden.plots.axis import Axis, by_decades, from_zero, through
from ekiden.plots.canvas import (
    BOTTOM,
    COLOURS,
    FAINT,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Points,
    colour,
    frame,
    legend,
    line,
    mark,
    svg,
    text,
)

_FLOOR = HEIGHT - BOTTOM
_SCALE = 34
"""Pixels that a second scale takes at the right."""
_DOT = 2.2


def lines(
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Points],
    *,
    log: bool | None = None,
) -> str:
    """Lines over the values of x that were measured, each value marked and written below. ``log``:
    equal steps of x are equal ratios; by default where the largest is 8 times the smallest."""
    across = through(_xs(series), LEFT, WIDTH - RIGHT, log=log)
    drawn, top = legend(list(series), marks=True)
    up = from_zero(_ys(series), _FLOOR, top)
    parts = [*frame(title, x_name, y_name, across, up), *drawn]
    for number, points in enumerate(series.values()):
        placed = [(across.at(x), up.at(y)) for x, y in points]
        parts.append(line(placed, colour(number)))
        parts += [mark(number, x, y) for x, y in placed]
    return svg(title, parts)


def curves(
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Points],
    *,
    goal: float | None = None,
) -> str:
    """Lines through many points, both axes from 0. ``goal``: a dashed level of y."""
    across = from_zero(_xs(series), LEFT, WIDTH - RIGHT)
    drawn, top = legend(list(series), marks=False)
    up = from_zero(chain(_ys(series), [goal or 0.0]), _FLOOR, top)
    parts = [*frame(title, x_name, y_name, across, up), *drawn]
    if goal:
        y = up.at(goal)
        parts.append(line([(LEFT, y), (WIDTH - RIGHT, y)], FAINT, dashed=True))
        parts.append(text(WIDTH - RIGHT, y - 5, "objective", anchor="end", size=11, ink=FAINT))
    parts += _joined(series, across, up)
    return svg(title, parts)


def densities(title: str, x_name: str, y_name: str, series: Mapping[str, Points]) -> str:
    """Outlines over an axis of ratios; x is above 0."""
    xs = list(_xs(series))
    across = by_decades(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    drawn, top = legend(list(series), marks=False)
    up = from_zero(_ys(series), _FLOOR, top)
    parts = [*frame(title, x_name, y_name, across, up), *drawn]
    return svg(title, [*parts, *_joined(series, across, up)])


def timeline(
    title: str,
    y_name: str,
    dots: Points,
    failed: Sequence[float],
    line_name: str,
    points: Points,
) -> str:
    """A dot for each request and a line over the same seconds, with a scale of its own to the
    right; ``failed`` moments are crosses at the foot."""
    right = WIDTH - RIGHT - _SCALE
    across = _seconds(max((x for x, _ in [*dots, *points]), default=1.0), right)
    names = [y_name, line_name, *(["failed"] if failed else [])]
    drawn, top = legend(names, marks=False)
    up = from_zero((y for _, y in dots), _FLOOR, top)
    other = from_zero((y for _, y in points), _FLOOR, top, whole=True)
    parts = [*frame(title, "seconds", y_name, across, up, right=right), *drawn]
    steps = [(across.at(x), other.at(y)) for x, y in _stairs(points)]
    parts.append(line(steps, COLOURS[1], width=1.2))
    parts += [
        f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="{_DOT}" fill="{COLOURS[0]}" '
        'fill-opacity="0.6"/>'
        for x, y in dots
    ]
    parts += [text(across.at(x), _FLOOR - 6, "×", size=15, ink=COLOURS[2]) for x in failed]
    parts += [
        text(right + 6, other.at(tick) + 4, f"{tick:,g}", anchor="start", ink=COLOURS[1])
        for tick in other.ticks
    ]
    return svg(title, parts)


def _joined(series: Mapping[str, Points], across: Axis, up: Axis) -> Iterator[str]:
    for number, points in enumerate(series.values()):
        yield line([(across.at(x), up.at(y)) for x, y in points], colour(number))


def _seconds(last: float, right: float) -> Axis:
    """From 0 to the last moment, which need not be round."""
    ticks = from_zero([last], LEFT, right).ticks
    inside = tuple(tick for tick in ticks if tick <= last)
    return Axis(low=0.0, high=last or 1.0, start=LEFT, end=right, ticks=inside)


def _stairs(points: Points) -> Iterable[tuple[float, float]]:
    before = 0.0
    for x, y in points:
        yield x, before
        yield x, y
        before = y


def _xs(series: Mapping[str, Points]) -> Iterator[float]:
    return (x for points in series.values() for x, _ in points)


def _ys(series: Mapping[str, Points]) -> Iterator[float]:
    return (y for points in series.values() for _, y in points)
