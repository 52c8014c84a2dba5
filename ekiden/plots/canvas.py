"""What every chart is made of: the sheet, its frame, its legend, text, lines and marks.

Colour carries no meaning alone: every series has its own mark or place, and a legend names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ekiden.plots.axis import Axis

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, BOTTOM = 64, 20, 48
EDGE = 16
"""Where titles and legends begin."""
COLOURS = ("#2563a8", "#d1495b", "#2a8c4a", "#c98a12", "#6b4e9b", "#0f8b8d", "#555555")
MARKS = ("circle", "square", "diamond", "triangle")
"""As many with as many colours tell 28 series apart."""
INK, GRID, FAINT = "#222", "#e3e3e3", "#777"
_SIZE = 4.0
_LEGEND, _ROW = 42, 18
_CHARACTER = 6.6
_APART = 28
"""Pixels between two ticks that can be read."""

Points = Sequence[tuple[float, float]]


def colour(number: int) -> str:
    """Of the series of that number."""
    return COLOURS[number % len(COLOURS)]


def text(
    x: float,
    y: float,
    said: str,
    *,
    anchor: str = "middle",
    size: int = 12,
    bold: bool = False,
    ink: str = INK,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight} '
        f'fill="{ink}">{escape(said)}</text>'
    )


def line(points: Points, ink: str, *, width: float = 2.0, dashed: bool = False) -> str:
    """Through ``points``, in pixels."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{joined}" fill="none" stroke="{ink}" stroke-width="{width}" '
        f'stroke-linejoin="round"{dashes}/>'
    )


def block(x: float, y: float, width: float, height: float, ink: str, said: str = "") -> str:
    """A filled rectangle; ``said`` is shown to who points at it."""
    title = f"<title>{escape(said)}</title>" if said else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{ink}">{title}</rect>'
    )


def mark(number: int, x: float, y: float) -> str:
    """Of the series of that number."""
    kind, ink, s = MARKS[number % len(MARKS)], colour(number), _SIZE
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{s}" fill="{ink}"/>'
    corners = {
        "square": ((-s, -s), (s, -s), (s, s), (-s, s)),
        "diamond": ((0, -s - 1), (s + 1, 0), (0, s + 1), (-s - 1, 0)),
        "triangle": ((0, -s), (s, s), (-s, s)),
    }[kind]
    joined = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{joined}" fill="{ink}"/>'


def legend(names: Sequence[str], *, marks: bool) -> tuple[list[str], float]:
    """In as many rows as it takes; and the height at which the drawing below it may begin."""
    parts, x, y = [], float(EDGE), float(_LEGEND)
    for number, name in enumerate(names):
        wide = 34 + _CHARACTER * len(name)
        if x > EDGE and x + wide > WIDTH:
            x, y = float(EDGE), y + _ROW
        dash = f'<path d="M{x:.1f} {y}h14" stroke="{colour(number)}" stroke-width="3"/>'
        parts.append(mark(number, x + 7, y) if marks else dash)
        parts.append(text(x + 19, y + 4, name, anchor="start"))
        x += wide
    return parts, y + 34


def frame(
    title: str, x_name: str, y_name: str, across: Axis, up: Axis, *, right: float = WIDTH - RIGHT
) -> list[str]:
    """Names, and a line at each tick of ``up``, whose end is the top of the drawing."""
    parts = [text(EDGE, 20, title, anchor="start", size=15, bold=True)]
    parts.append(text((LEFT + right) / 2, HEIGHT - 10, x_name))
    parts.append(text(EDGE, up.end - 12, y_name, anchor="start", size=11))
    for tick in up.ticks:
        y = up.at(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right:.1f}" stroke="{GRID if tick else "#444"}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:,g}", anchor="end"))
    for tick in _readable(across):
        parts.append(text(across.at(tick), HEIGHT - BOTTOM + 18, f"{tick:,g}"))
    return parts


def svg(title: str, parts: Sequence[str], *, height: int = HEIGHT) -> str:
    """A whole picture. In a file of its own it can be opened by any browser."""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="{escape(title, quote=True)}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _readable(axis: Axis) -> list[float]:
    """Ticks without those that would be written over the one before."""
    kept: list[float] = []
    for tick in axis.ticks:
        if not kept or axis.at(tick) - axis.at(kept[-1]) > _APART:
            kept.append(tick)
    return kept
