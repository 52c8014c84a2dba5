"""From the records of a level to its figures. docs/bench.md has each definition in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ekiden.bench.histogram import Histogram, middle
from ekiden.bench.record import Record
from ekiden.bench.result import Bucket, Level, Samples, Service
from ekiden.measures.goodput import Slo
from ekiden.measures.run import common, in_order, samples, to_ms
from ekiden.measures.spread import POINTS, Spread, ms

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
    rows = in_order(records)
    good = [row for row in rows if row.ok]
    lag_ms = ms(row.lag_s for row in rows)
    return Level(
        name=name,
        load=load,
        value=value if math.isfinite(value) else None,
        error_details={row.error: row.detail for row in reversed(rows) if not row.ok},
        ttft_from_send_ms=ms(row.ttft_s - row.lag_s for row in good),
        e2e_from_send_ms=ms(row.e2e_s - row.lag_s for row in good),
        itl_ms=_gaps(gaps),
        itl_jitter_ms=ms(row.itl_std_s for row in good if row.output_tokens > 1),
        schedule_lag_ms=lag_ms,
        short_answers=sum(row.output_tokens < row.asked_output for row in good),
        counted_by_server=all(row.counted for row in good),
        client_cpu_share=client_cpu,
        service=service,
        notes=_notes(lag_ms, client_cpu),
        itl_histogram=[
            Bucket(middle(bucket) * 1000, count) for bucket, count in sorted(gaps.counts.items())
        ],
        samples=_samples(rows),
        **common(rows, slo),
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
        sent_s=[round(row.sent_s, 6) for row in rows],
        itl_std_ms=[to_ms(row.itl_std_s) if row.ok else None for row in rows],
        **samples(rows),
    )
