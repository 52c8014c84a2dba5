"""Charts as SVG, written by hand: lines over a linear or a doubling axis, and bars.

Colours carry no meaning alone: every line has its own mark, and a legend names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks.results import figure

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 74, 56
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6b4e9b", "#555555")
MARKS = ("circle", "square", "diamond", "triangle")
"""As many with as many colours tell twelve lines apart."""
LEGEND, LEGEND_ROW = 44, 18
"""Where its first row is, and how far the next one is from it."""
TICKS = 5
MARK_SIZE = 4.5

Line = Sequence[tuple[float, float]]
"""Points (x, y), x ascending."""


def lines(
    path: Path, title: str, x_name: str, y_name: str, series: Mapping[str, Line], *, doubling: bool
) -> None:
    """Write a line chart. ``doubling``: equal steps of x are factors of two (x > 0)."""
    xs = sorted({x for line in series.values() for x, _ in line})
    top = _top(y for line in series.values() for _, y in line)
    place = math.log2 if doubling else float
    low, high = place(xs[0]), place(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (place(x) - low) / ((high - low) or 1)
        return LEFT + across * _inner_width(), _height_of(y, top)

    parts = [*_frame(title, x_name, y_name, top), *_legend(list(series))]
    parts += [_text(at(x, 0)[0], HEIGHT - BOTTOM + 18, f"{x:g}") for x in xs]
    for number, line in enumerate(series.values()):
        points = [at(x, y) for x, y in line]
        colour = COLOURS[number % len(COLOURS)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [_mark(MARKS[number % len(MARKS)], x, y, colour) for x, y in points]
    _write(path, parts)


def bars(
    path: Path,
    title: str,
    y_name: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
) -> None:
    """Write a bar chart: a bar of each series in each group, its value above it."""
    top = _top(y for values in series.values() for y in values)
    step = _inner_width() / len(groups)
    wide = step * 0.8 / len(series)
    parts = [*_frame(title, "", y_name, top), *_legend(list(series))]
    for place, group in enumerate(groups):
        start = LEFT + place * step + step * 0.1
        parts.append(_text(start + step * 0.4, HEIGHT - BOTTOM + 18, group))
        for number, values in enumerate(series.values()):
            x, y = start + number * wide, _height_of(values[place], top)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide * 0.92:.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{COLOURS[number % len(COLOURS)]}"/>'
            )
            parts.append(_text(x + wide * 0.46, y - 4, figure(values[place]), size=11))
    _write(path, parts)


def _top(values: object) -> float:
    """The end of the y axis: a round number no less than all values."""
    largest = max(values, default=0.0) or 1.0  # type: ignore[call-overload]
    unit = 10.0 ** math.floor(math.log10(largest))
    return float(next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= largest))


def _inner_width() -> float:
    return WIDTH - LEFT - RIGHT


def _height_of(y: float, top: float) -> float:
    return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)


def _frame(title: str, x_name: str, y_name: str, top: float) -> list[str]:
    parts = [_text(LEFT, 24, title, anchor="start", size=16, bold=True)]
    parts.append(_text(LEFT + _inner_width() / 2, HEIGHT - 14, x_name))
    parts.append(_text(LEFT - 56, TOP - 12, y_name, anchor="start"))
    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        y = _height_of(value, top)
        shade = "#333" if tick == 0 else "#ddd"
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{shade}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:,g}", anchor="end"))
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts, x, y = [], float(LEFT), LEGEND
    for number, name in enumerate(names):
        wide = 40 + 6.8 * len(name)
        if x + wide > WIDTH and x > LEFT:
            x, y = float(LEFT), y + LEGEND_ROW
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_mark(MARKS[number % len(MARKS)], x + 5, y, colour))
        parts.append(_text(x + 16, y + 4, name, anchor="start"))
        x += wide
    return parts


def _mark(kind: str, x: float, y: float, colour: str) -> str:
    s = MARK_SIZE
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{s}" fill="{colour}"/>'
    corners = {
        "square": ((-s, -s), (s, -s), (s, s), (-s, s)),
        "diamond": ((0, -s - 1), (s + 1, 0), (0, s + 1), (-s - 1, 0)),
        "triangle": ((0, -s), (s, s), (-s, s)),
    }[kind]
    joined = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{joined}" fill="{colour}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>'
        f"{escape(text)}</text>"
    )


def _write(path: Path, parts: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = "\n".join(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" fill="#222">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )
    print(f"written: {path}")
