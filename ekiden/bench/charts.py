"""Charts as SVG, self-contained, one string each.

Colour carries no meaning alone: every series has its own mark, and a legend names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ekiden.bench.axis import Axis, by_decades, from_zero, through

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 64, 48
COLOURS = ("#2563a8", "#d1495b", "#2a8c4a", "#c98a12", "#6b4e9b", "#555555")
_MARKS = ("circle", "square", "diamond", "triangle")
_SIZE = 4.0

Points = Sequence[tuple[float, float]]


def lines(title: str, x_name: str, y_name: str, series: Mapping[str, Points]) -> str:
    """Lines over the values of x that were measured."""
    across = through((x for points in series.values() for x, _ in points), LEFT, WIDTH - RIGHT)
    up = _up(y for points in series.values() for _, y in points)
    parts = _frame(title, x_name, y_name, across, up)
    parts += _legend(list(series), marks=True)
    for number, points in enumerate(series.values()):
        placed = [(across.at(x), up.at(y)) for x, y in points]
        parts.append(_line(placed, _colour(number)))
        parts += [_mark(number, x, y) for x, y in placed]
    return _svg(title, parts)


def densities(title: str, x_name: str, y_name: str, series: Mapping[str, Points]) -> str:
    """Outlines over an axis of ratios; x is above 0."""
    xs = [x for points in series.values() for x, _ in points]
    across = by_decades(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _up(y for points in series.values() for _, y in points)
    parts = _frame(title, x_name, y_name, across, up)
    parts += _legend(list(series), marks=False)
    for number, points in enumerate(series.values()):
        parts.append(_line([(across.at(x), up.at(y)) for x, y in points], _colour(number)))
    return _svg(title, parts)


def timeline(
    title: str,
    y_name: str,
    dots: Points,
    failed: Sequence[float],
    line_name: str,
    line: Points,
) -> str:
    """A dot for each request and a line over the same seconds, with a scale of its own to the
    right; ``failed`` moments are crosses at the foot."""
    last = max((x for x, _ in [*dots, *line]), default=1.0)
    right = WIDTH - RIGHT - 34
    across = from_zero([last], LEFT, right)
    across = Axis(
        low=0.0, high=last or 1.0, start=LEFT, end=right,
        ticks=tuple(tick for tick in across.ticks if tick <= last),
    )  # fmt: skip
    up = _up(y for _, y in dots)
    other = from_zero((y for _, y in line), HEIGHT - BOTTOM, TOP, whole=True)
    parts = _frame(title, "seconds", y_name, across, up, right=right)
    names = [y_name, line_name, *(["failed"] if failed else [])]
    parts += _legend(names, marks=False)
    steps = [(across.at(x), other.at(y)) for x, y in _stairs(line)]
    parts.append(_line(steps, COLOURS[1], width=1.2))
    parts += [
        f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="2.2" fill="{COLOURS[0]}" '
        'fill-opacity="0.6"/>'
        for x, y in dots
    ]
    foot = HEIGHT - BOTTOM - 6
    parts += [_text(across.at(x), foot, "×", size=15, colour=COLOURS[2]) for x in failed]
    parts += [
        _text(right + 6, other.at(tick) + 4, f"{tick:,g}", anchor="start", colour=COLOURS[1])
        for tick in other.ticks
    ]
    return _svg(title, parts)


def _stairs(points: Points) -> Iterable[tuple[float, float]]:
    before = 0.0
    for x, y in points:
        yield x, before
        yield x, y
        before = y


def _up(values: Iterable[float]) -> Axis:
    return from_zero(values, HEIGHT - BOTTOM, TOP)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _frame(
    title: str, x_name: str, y_name: str, across: Axis, up: Axis, *, right: float = WIDTH - RIGHT
) -> list[str]:
    parts = [_text(LEFT - 48, 20, title, anchor="start", size=15, bold=True)]
    parts.append(_text((LEFT + right) / 2, HEIGHT - 10, x_name))
    parts.append(_text(LEFT - 48, TOP - 12, y_name, anchor="start", size=11))
    for tick in up.ticks:
        y = up.at(tick)
        shade = "#e3e3e3" if tick else "#444"
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right:.1f}" stroke="{shade}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:,g}", anchor="end"))
    for tick in _readable(across):
        parts.append(_text(across.at(tick), HEIGHT - BOTTOM + 18, f"{tick:,g}"))
    return parts


def _readable(axis: Axis) -> list[float]:
    """Ticks without those that would be written over the one before."""
    kept: list[float] = []
    for tick in axis.ticks:
        if not kept or axis.at(tick) - axis.at(kept[-1]) > 28:
            kept.append(tick)
    return kept


def _legend(names: Sequence[str], *, marks: bool) -> list[str]:
    parts, x = [], WIDTH - RIGHT - sum(_legend_width(name) for name in names)
    for number, name in enumerate(names):
        y, colour = 40.0, _colour(number)
        bar = f'<path d="M{x:.1f} {y}h14" stroke="{colour}" stroke-width="3"/>'
        parts.append(_mark(number, x + 7, y) if marks else bar)
        parts.append(_text(x + 19, y + 4, name, anchor="start"))
        x += _legend_width(name)
    return parts


def _legend_width(name: str) -> float:
    return 34 + 6.4 * len(name)


def _line(points: Points, colour: str, *, width: float = 2.0) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}" '
        'stroke-linejoin="round"/>'
    )


def _mark(number: int, x: float, y: float) -> str:
    kind, colour, s = _MARKS[number % len(_MARKS)], _colour(number), _SIZE
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
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "middle",
    size: int = 12,
    bold: bool = False,
    colour: str = "#222",
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight} '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _svg(title: str, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="{escape(title, quote=True)}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>'
    )
