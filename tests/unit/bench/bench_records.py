"""Records made by hand, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ekiden.bench import figures
from ekiden.bench.histogram import Histogram
from ekiden.bench.record import Record
from ekiden.bench.result import Level, Result
from ekiden.measures.goodput import Slo


def record(index: int = 0, **changes: Any) -> Record:
    """Due at 1 s, sent 0.1 s late, first token at 1.5 s, 11 tokens by 2.5 s."""
    fields = {
        "asked_prompt": 5,
        "asked_output": 11,
        "scheduled_s": 1.0,
        "sent_s": 1.1,
        "first_s": 1.5,
        "ended_s": 2.5,
        "prompt_tokens": 5,
        "output_tokens": 11,
        "counted": True,
    }
    return Record(index=index, **{**fields, **changes})


def level_of(
    records: Sequence[Record], *, slo: Slo | None = None, name: str = "rate 1", value: float = 1.0
) -> Level:
    gaps = Histogram()
    for row in records:
        if row.ok:
            gaps.add(row.tpot_s or 0.0)
    return figures.level(
        name=name,
        load="rate",
        value=value,
        records=records,
        gaps=gaps,
        client_cpu=0.1,
        slo=slo or Slo(),
        service=None,
    )


def result_of(*levels: Level, **changes: Any) -> Result:
    fields = {
        "version": "0",
        "started": "2026-01-01T00:00:00+00:00",
        "url": "http://h:1",
        "model": "m",
        "endpoint": "completions",
        "workload": "short-short (256/128)",
        "arrival": "poisson",
        "seed": 0,
        "processes": 1,
        "prompts": "exact",
        "slo": Slo(),
        "notes": [],
        "levels": list(levels),
    }
    return Result(**{**fields, **changes})
