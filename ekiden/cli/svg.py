"""Small charts as inline SVG: lines and stacked bars, without a script or a font from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44
COLOURS = ("#1b6ca8", "#d1495b", "#3c7a3e", "#8a5a00", "#6b4c9a", "#4d4d4d", "#0f8b8d")
_TICKS = 5
_ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
_ROW = 34


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    *,
    goal: float | None = None,
) -> str:
    """One line for each name, axes from 0; ``goal``: a dashed level."""
    points = [point for one in series.values() for point in one]
    if not points:
        return ""
    right = _nice(max(p[0] for p in points))
    top = _nice(max([p[1] for p in points] + ([goal] if goal else [])))

    def place(point: tuple[float, float]) -> str:
        across = _LEFT + point[0] / right * (WIDTH - _LEFT - _RIGHT)
        up = HEIGHT - _BOTTOM - point[1] / top * (HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{up:.1f}"

    parts = [_axes(right, top, x, y)]
    for index, one in enumerate(series.values()):
        path = " ".join(place(point) for point in one)
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    if goal:
        ends = f"{place((0, goal))} {place((right, goal))}"
        parts.append(
            f'<polyline points="{ends}" fill="none" stroke="#777" stroke-dasharray="5 4"/>'
        )
    return _svg(HEIGHT, parts) + legend(series)


def bars(rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One bar for each name, its parts one after the other."""
    most = _nice(max((sum(parts.values()) for parts in rows.values()), default=1.0))
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    drawn = []
    for row, (label, parts) in enumerate(rows.items()):
        at, y = 0.0, 8 + row * _ROW
        drawn.append(
            f'<text x="{_LEFT * 2 - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>'
        )
        for name, size in parts.items():
            width = max(0.0, size) / most * (WIDTH - 2 * _LEFT - _RIGHT)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            drawn.append(
                f'<rect x="{_LEFT * 2 + at:.1f}" y="{y}" width="{width:.1f}" height="22" '
                f'fill="{colour}"><title>{escape(name)}: {size:.2f} {unit}</title></rect>'
            )
            at += width
    return _svg(16 + len(rows) * _ROW, drawn) + legend(names)


def legend(names: Mapping[str, object] | Sequence[str]) -> str:
    """Coloured squares with their names."""
    parts = [
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    ]
    return f'<p class="legend">{"".join(parts)}</p>'


def _svg(height: int, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" font-size="12" fill="#444">'
    return f"{head}{''.join(parts)}</svg>"


def _nice(most: float) -> float:
    """The next round number."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in _ROUND if step * power >= most * (1 - 1e-9))


def _axes(right: float, top: float, x: str, y: str) -> str:
    bottom, width, height = HEIGHT - _BOTTOM, WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    parts = []
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        up, across = bottom - share * height, _LEFT + share * width
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up}" y2="{up}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{up + 4}" text-anchor="end">{share * top:g}</text>'
            f'<text x="{across}" y="{bottom + 16}" text-anchor="middle">{share * right:.4g}</text>'
        )
    parts.append(
        f'<text x="{_LEFT + width / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>'
        f'<text x="14" y="{_TOP + height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {_TOP + height / 2})">{escape(y)}</text>'
    )
    return "".join(parts)
