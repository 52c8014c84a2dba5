"""The end of every bench: build/bench/NAME.json, and the same as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("build/bench")
COLUMNS = ("name", "ours", "peer", "peer_name", "unit", "ratio", "goal", "met")
NOT_MEASURED = "not measured"

Row = dict[str, Any]
"""One figure, keys ``COLUMNS``. ``ratio`` is ours over peer; what is not there is None."""


def row(
    name: str,
    ours: float | None,
    unit: str,
    *,
    peer: float | None = None,
    peer_name: str | None = None,
    goal: float | None = None,
) -> Row:
    """A figure of ours, beside a peer's where ``peer_name`` is given.

    ``goal`` is the least ratio. ``met`` is None where either figure was not measured.
    """
    ratio = ours / peer if ours is not None and peer else None
    met = None if goal is None or ratio is None else ratio >= goal
    return dict(zip(COLUMNS, (name, ours, peer, peer_name, unit, ratio, goal, met), strict=True))


def publish(name: str, rows: Sequence[Row]) -> Path:
    """Write ``build/bench/name.json``, print the table, return the file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
    print(f"\n{table(rows)}\n\nwritten: {path}")
    return path


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, columns that are empty throughout left out."""
    shown = [column for column in COLUMNS if any(_cell(r, column) for r in rows)]
    return markdown(shown, [[_cell(r, column) for column in shown] for r in rows])


def markdown(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(value: float) -> str:
    """Three significant digits or so: 0.123, 12.3, 1,234."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def _cell(row: Row, column: str) -> str:
    value = row[column]
    if value is None:
        measured = column == "ours" or (column == "peer" and row["peer_name"] is not None)
        return NOT_MEASURED if measured else ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float | int):
        return f"{value:.2f}" if column in ("ratio", "goal") else figure(value)
    return str(value)
