"""The report as one HTML file: nothing is loaded from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from ekiden.bench.result import Level, Result, Samples
from ekiden.bench.table import notes, service_lines
from ekiden.measures.spread import Spread
from ekiden.measures.table import milliseconds
from ekiden.plots import lines

MAX_DOTS = 2000
"""Requests of a timeline that are drawn; of more, every nth."""
MAX_OUTLINES = 5
_BINS_PER_FACTOR = 24
_FAR = 4
"""Times; what is further from the median below, or from P99 above, is not drawn."""
_POINTS = ("p50", "p95", "p99")
_TIMES = (
    ("TTFT", "ttft_ms"),
    ("TTFT from sending", "ttft_from_send_ms"),
    ("TPOT", "tpot_ms"),
    ("ITL", "itl_ms"),
    ("ITL jitter", "itl_jitter_ms"),
    ("E2E", "e2e_ms"),
    ("schedule lag", "schedule_lag_ms"),
)
_X_NAMES = {
    "rate": "requests/s",
    "concurrency": "requests at a time",
    "trace": "speed of the trace",
}
_STYLE = """
body { font: 15px/1.5 sans-serif; color: #222; background: #fff; margin: 2em auto;
  max-width: 84em; padding: 0 1.5em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25em .8em; text-align: right; border-bottom: 1px solid #e3e3e3; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
.charts { display: flex; flex-wrap: wrap; gap: 1em; } svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; } .note { color: #8a3b00; }
"""


def write(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(result), encoding="utf-8")


def page(result: Result) -> str:
    title = f"{result.model}: {result.workload}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(_body(title, result)) + "\n"
        "</body>\n</html>\n"
    )


def _body(title: str, result: Result) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield from _about(result)
    yield from (f'<p class="note">{escape(note)}</p>' for note in notes(result))
    yield '<div class="scroll">'
    yield _table(_head(), [_row(level) for level in result.levels])
    yield "</div>"
    yield '<div class="charts">'
    yield from _sweep(result.levels)
    yield from _itl(result.levels)
    yield "</div>"
    for level in result.levels:
        yield f"<h2>{escape(level.name)}</h2>"
        yield from _level(level)


def _about(result: Result) -> Iterator[str]:
    facts = (
        ("server", f"{result.url}, {result.endpoint}"),
        ("started", result.started),
        ("arrivals", result.arrival),
        ("prompts", result.prompts),
        ("SLO", _slo(result)),
        ("load", f"seed {result.seed}, {result.processes} processes, ekiden {result.version}"),
    )
    yield "<p>" + "<br>\n".join(f"{k}: {escape(v)}" for k, v in facts if v) + "</p>"


def _slo(result: Result) -> str:
    limits = (
        ("TTFT", result.slo.ttft_ms),
        ("TPOT", result.slo.tpot_ms),
        ("E2E", result.slo.e2e_ms),
    )
    return ", ".join(f"{name} up to {limit:g} ms" for name, limit in limits if limit)


def _head() -> list[str]:
    return [
        "load", "requests", "failed", "requests/s", "output tokens/s", "TTFT p50, p95, p99 ms",
        "TPOT p50, p95, p99 ms", "ITL p50, p99 ms", "E2E p50, p99 ms", "goodput",
    ]  # fmt: skip


def _row(level: Level) -> list[str]:
    good = level.goodput
    return [
        level.name,
        str(level.requests),
        str(level.requests - level.succeeded),
        f"{level.requests_per_s:.2f}",
        f"{level.output_tokens_per_s:,.1f}",
        _points(level.ttft_ms, *_POINTS),
        _points(level.tpot_ms, *_POINTS),
        _points(level.itl_ms, "p50", "p99"),
        _points(level.e2e_ms, "p50", "p99"),
        "" if good is None else f"{good.requests_per_s:.2f}/s, {good.share:.0%}",
    ]


def _points(spread: Spread, *names: str) -> str:
    return ", ".join(milliseconds(getattr(spread, n)) for n in names) if spread.count else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<table>", "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def _sweep(levels: Sequence[Level]) -> Iterator[str]:
    """Times and throughput against the load; nothing of a single level."""
    placed = [(level.value, level) for level in levels if level.value and level.succeeded]
    if len({value for value, _ in placed}) < 2:
        return
    x_name = _X_NAMES[levels[0].load]
    for name, field in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        series = {
            p: [(v, getattr(getattr(level, field), p)) for v, level in placed] for p in _POINTS
        }
        yield lines.lines(f"{name} against load", x_name, "ms", series)
    tokens = {"output tokens/s": [(value, level.output_tokens_per_s) for value, level in placed]}
    yield lines.lines("Throughput against load", x_name, "tokens/s", tokens)
    if all(level.goodput for _, level in placed):
        both = {
            "answered": [(value, level.requests_per_s) for value, level in placed],
            "within the SLO": [
                (value, level.goodput.requests_per_s) for value, level in placed if level.goodput
            ],
        }
        yield lines.lines("Goodput against load", x_name, "requests/s", both)


def _itl(levels: Sequence[Level]) -> Iterator[str]:
    """Of a few levels, evenly chosen."""
    told = [level for level in levels if level.itl_ms.count]
    step = max(1, math.ceil(len(told) / MAX_OUTLINES))
    series = {level.name: _outline(level) for level in told[::step]}
    series = {name: points for name, points in series.items() if len(points) > 1}
    if series:
        yield lines.densities("Inter-token latency", "ms", "% of gaps", series)


def _outline(level: Level) -> list[tuple[float, float]]:
    """Shares of gaps in bins of equal ratio, without what is far from nearly all: an axis of
    ratios would be mostly empty, and gaps within one read (0 ms) have no place on it."""
    bins: dict[int, int] = {}
    most = level.itl_ms.p99 * _FAR
    for bucket in level.itl_histogram:
        if level.itl_ms.p50 / _FAR <= bucket.ms <= most and bucket.ms > 0:
            place = math.floor(math.log(bucket.ms) * _BINS_PER_FACTOR)
            bins[place] = bins.get(place, 0) + bucket.count
    if not bins:
        return []
    total = sum(bucket.count for bucket in level.itl_histogram)
    return [
        (math.exp((place + 0.5) / _BINS_PER_FACTOR), 100 * bins.get(place, 0) / total)
        for place in range(min(bins) - 1, max(bins) + 2)
    ]


def _level(level: Level) -> Iterator[str]:
    rows = [
        [
            name,
            *(
                milliseconds(getattr(spread, p))
                for p in ("mean", "p50", "p90", "p95", "p99", "max")
            ),
        ]
        for name, field in _TIMES
        if (spread := getattr(level, field)).count
    ]
    yield _table(["ms", "mean", "p50", "p90", "p95", "p99", "max"], rows)
    if level.service is not None:
        yield "<p>" + "<br>\n".join(escape(line) for line in service_lines(level.service)) + "</p>"
    if level.requests:
        yield _timeline(level)


def _timeline(level: Level) -> str:
    samples = level.samples
    start = min(samples.sent_s)
    step = max(1, math.ceil(len(samples.index) / MAX_DOTS))
    dots = [
        (when - start, ttft)
        for when, ttft, error in zip(samples.sent_s, samples.ttft_ms, samples.error, strict=True)
        if ttft is not None and not error
    ]
    failed = [
        sent - start for sent, error in zip(samples.sent_s, samples.error, strict=True) if error
    ]
    return lines.timeline(
        f"Timeline, {level.name}",
        "TTFT (ms)",
        dots[::step],
        failed[::step],
        "in flight",
        in_flight(samples),
    )


def in_flight(samples: Samples) -> list[tuple[float, float]]:
    """(seconds from the first request, requests sent and not ended) at each change."""
    start = min(samples.sent_s)
    changes: list[tuple[float, int]] = []
    for scheduled, sent, e2e in zip(
        samples.scheduled_s, samples.sent_s, samples.e2e_ms, strict=True
    ):
        changes += [(sent - start, 1), (scheduled + e2e / 1000 - start, -1)]
    level, points = 0, []
    for when, change in sorted(changes):
        level += change
        points.append((when, float(level)))
    return points
