"""From the records of a level to its figures. docs/bench.md has each definition in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ekiden.bench.histogram import Histogram, middle
from ekiden.bench.record import Record
from ekiden.bench.result import Bucket, Level, Samples, Service
from ekiden.measures.goodput import Slo, goodput
from ekiden.measures.spread import POINTS, Spread, ms, rate, spread

LATE_MS = 10.0
"""Of the schedule, at P99: above it the run says that the client was late."""
BUSY = 0.8
"""Of a core: above it the run says that the client may have been the limit."""


def level(
    *,
    name: str,
    load: str,
    value: float,
    records: Sequence[Record],
    gaps: Histogram,
    client_cpu: float,
    slo: Slo,
    service: Service | None,
) -> Level:
    """The figures of one level; ``records`` has a record of each request, warm-up left out."""
    rows = sorted(records, key=lambda row: (row.scheduled_s, row.index))
    good = [row for row in rows if row.ok]
    errors = Counter(row.error for row in rows if not row.ok)
    passed = _duration(rows)
    output = sum(row.output_tokens for row in good)
    prompt = sum(row.prompt_tokens for row in good)
    spread_of = {
        "ttft_ms": ms(row.ttft_s for row in good),
        "ttft_from_send_ms": ms(row.ttft_s - row.lag_s for row in good),
        "tpot_ms": ms(row.tpot_s for row in good if row.tpot_s is not None),
        "itl_jitter_ms": ms(row.itl_std_s for row in good if row.output_tokens > 1),
        "e2e_ms": ms(row.e2e_s for row in good),
        "e2e_from_send_ms": ms(row.e2e_s - row.lag_s for row in good),
        "schedule_lag_ms": ms(row.lag_s for row in rows),
        "prompt_tokens": spread(row.prompt_tokens for row in good),
        "output_tokens": spread(row.output_tokens for row in good),
    }
    return Level(
        name=name,
        load=load,
        value=value if math.isfinite(value) else None,
        requests=len(rows),
        succeeded=len(good),
        errors=dict(errors),
        error_details={row.error: row.detail for row in reversed(rows) if not row.ok},
        error_rate=1 - len(good) / len(rows) if rows else 0.0,
        duration_s=passed,
        requests_per_s=rate(len(good), passed),
        output_tokens_per_s=rate(output, passed),
        total_tokens_per_s=rate(output + prompt, passed),
        itl_ms=_gaps(gaps),
        goodput=goodput(rows, slo, passed),
        short_answers=sum(row.output_tokens < row.asked_output for row in good),
        counted_by_server=all(row.counted for row in good),
        client_cpu_share=client_cpu,
        service=service,
        notes=_notes(spread_of["schedule_lag_ms"], client_cpu),
        itl_histogram=[
            Bucket(middle(bucket) * 1000, count) for bucket, count in sorted(gaps.counts.items())
        ],
        samples=_samples(rows),
        **spread_of,
    )


def _gaps(gaps: Histogram) -> Spread:
    points = {name: 1000 * gaps.percentile(percent) for name, percent in POINTS.items()}
    return Spread(
        count=gaps.count,
        mean=1000 * gaps.mean_s,
        std=1000 * gaps.std_s,
        min=1000 * gaps.percentile(0),
        max=1000 * gaps.largest_s,
        **points,
    )


def _duration(rows: Sequence[Record]) -> float:
    """From the first request that was sent to the last that ended."""
    if not rows:
        return 0.0
    return max(row.ended_s for row in rows) - min(row.sent_s for row in rows)


def _notes(lag: Spread, client_cpu: float) -> list[str]:
    notes = []
    if lag.p99 > LATE_MS:
        notes.append(
            f"requests were sent late (P99 {lag.p99:.1f} ms), and times count from the scheduled "
            "moment: the client's machine was busy, or --max-in-flight or --processes is too low"
        )
    if client_cpu > BUSY:
        notes.append(
            f"a process of the load used {client_cpu:.0%} of a core and may have been the limit: "
            "more --processes"
        )
    return notes


def _samples(rows: Sequence[Record]) -> Samples:
    return Samples(
        index=[row.index for row in rows],
        scheduled_s=[round(row.scheduled_s, 6) for row in rows],
        sent_s=[round(row.sent_s, 6) for row in rows],
        ttft_ms=[_ms_or_none(row.ttft_s if row.first_s is not None else None) for row in rows],
        tpot_ms=[_ms_or_none(row.tpot_s) if row.ok else None for row in rows],
        itl_std_ms=[_ms_or_none(row.itl_std_s) if row.ok else None for row in rows],
        e2e_ms=[round(1000 * row.e2e_s, 3) for row in rows],
        prompt_tokens=[row.prompt_tokens for row in rows],
        output_tokens=[row.output_tokens for row in rows],
        error=[row.error for row in rows],
    )


def _ms_or_none(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
