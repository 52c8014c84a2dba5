"""A result as CSV: a line a level, a column a figure."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ekiden.bench.result import Level, Result
from ekiden.measures.spread import Spread

_PLAIN = (
    "name", "load", "value", "requests", "succeeded", "error_rate", "duration_s", "requests_per_s",
    "output_tokens_per_s", "total_tokens_per_s", "short_answers", "client_cpu_share",
)  # fmt: skip
_POINTS = ("mean", "std", "p50", "p90", "p95", "p99", "max")


def write(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(_columns(result, level)) for level in result.levels]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _columns(result: Result, level: Level) -> Iterator[tuple[str, Any]]:
    yield "model", result.model
    yield "workload", result.workload
    yield from ((name, getattr(level, name)) for name in _PLAIN)
    good = level.goodput
    yield "goodput_requests_per_s", "" if good is None else good.requests_per_s
    yield "goodput_share", "" if good is None else good.share
    for name in Level.__struct_fields__:
        value = getattr(level, name)
        if isinstance(value, Spread):
            yield from ((f"{name}_{point}", getattr(value, point)) for point in _POINTS)
