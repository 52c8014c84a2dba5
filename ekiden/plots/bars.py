"""Bars beside one another, and bars of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ekiden.plots.axis import Axis, from_zero
from ekiden.plots.canvas import (
    BOTTOM,
    EDGE,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    block,
    colour,
    frame,
    legend,
    svg,
    text,
)

_FLOOR = HEIGHT - BOTTOM
_FILLED = 0.8
"""Of a group's place; the rest parts it from the next."""
_ROW, _THICK = 34, 22
_LABEL = 6.6
"""Pixels of a character of a bar's name."""


def bars(
    title: str,
    y_name: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    show: Callable[[float], str] = "{:g}".format,
) -> str:
    """A bar of each series in each group, its value above it as ``show`` writes it."""
    drawn, top = legend(list(series), marks=False)
    up = from_zero((y for values in series.values() for y in values), _FLOOR, top)
    nowhere = Axis(low=0.0, high=1.0, start=LEFT, end=WIDTH - RIGHT, ticks=())
    parts = [*frame(title, "", y_name, nowhere, up), *drawn]
    step = (WIDTH - LEFT - RIGHT) / len(groups)
    wide = step * _FILLED / len(series)
    for place, group in enumerate(groups):
        start = LEFT + (place + (1 - _FILLED) / 2) * step
        parts.append(text(start + step * _FILLED / 2, _FLOOR + 18, group))
        for number, values in enumerate(series.values()):
            x, y = start + number * wide, up.at(values[place])
            parts.append(block(x, y, wide * 0.92, _FLOOR - y, colour(number)))
            parts.append(text(x + wide * 0.46, y - 4, show(values[place]), size=11))
    return svg(title, parts)


def stacked(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """A lying bar for each name, its parts one after the other over one axis from 0."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    drawn, top = legend(names, marks=False)
    left = EDGE + _LABEL * max(map(len, rows), default=0) + 12
    sums = [sum(max(0.0, size) for size in parts.values()) for parts in rows.values()]
    across = from_zero(sums, left, WIDTH - RIGHT)
    floor = top + len(rows) * _ROW
    parts = [text(EDGE, 20, title, anchor="start", size=15, bold=True), *drawn]
    for tick in across.ticks:
        x = across.at(tick)
        parts.append(f'<path d="M{x:.1f} {top - 12:.1f}V{floor:.1f}" stroke="#e3e3e3"/>')
        parts.append(text(x, floor + 18, f"{tick:,g}"))
    parts.append(text((left + WIDTH - RIGHT) / 2, floor + 38, unit))
    for row, (name, sizes) in enumerate(rows.items()):
        y, before = top + row * _ROW, 0.0
        parts.append(text(left - 8, y + 15, name, anchor="end"))
        for part, size in sizes.items():
            x, before = across.at(before), before + max(0.0, size)
            said = f"{part}: {size:.2f} {unit}"
            parts.append(
                block(x, y, across.at(before) - x, _THICK, colour(names.index(part)), said)
            )
    return svg(title, parts, height=round(floor + 48))
