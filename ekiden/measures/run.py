"""The figures that a measured and a simulated run have in common, by the same arithmetic.

``ekiden bench --json`` has them of each level, ``ekiden sim --json`` of each run; ``ekiden bench
compare`` goes by them alone, and so takes either. docs/bench.md has each definition in words.
Durations are milliseconds in fields that end in ``_ms``, seconds in those that end in ``_s``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ekiden.measures.goodput import Ended, Goodput, Slo, goodput
from ekiden.measures.spread import Spread, ms, rate, spread


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """A row of values for each request, in the order in which they were due. None: not there."""

    index: list[int]
    scheduled_s: list[float]
    ttft_ms: list[float | None]
    """From the scheduled moment in an open loop, from sending in a closed one."""
    tpot_ms: list[float | None]
    e2e_ms: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    error: list[str]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Requests under one load. Times and tokens are of answers that came."""

    name: str
    requests: int
    succeeded: int
    errors: dict[str, int]
    """Failures by their kind."""
    error_rate: float
    duration_s: float
    """From the first request that was sent to the last that ended."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Those of the prompts as well."""
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    goodput: Goodput | None
    prompt_tokens: Spread
    output_tokens: Spread
    samples: Samples


class Row(Ended, Protocol):
    """A request that has ended. Moments in seconds from the start of its run."""

    @property
    def index(self) -> int: ...
    @property
    def scheduled_s(self) -> float: ...
    @property
    def sent_s(self) -> float: ...
    @property
    def first_s(self) -> float | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def error(self) -> str: ...


R = TypeVar("R", bound=Row)


def in_order(rows: Sequence[R]) -> list[R]:
    """As they were due."""
    return sorted(rows, key=lambda row: (row.scheduled_s, row.index))


def common(rows: Sequence[Row], slo: Slo) -> dict[str, Any]:
    """The fields of a ``Run`` but its name and its samples."""
    good = [row for row in rows if row.ok]
    passed = _duration(rows)
    output = sum(row.output_tokens for row in good)
    prompt = sum(row.prompt_tokens for row in good)
    return {
        "requests": len(rows),
        "succeeded": len(good),
        "errors": dict(Counter(row.error for row in rows if not row.ok)),
        "error_rate": 1 - len(good) / len(rows) if rows else 0.0,
        "duration_s": passed,
        "requests_per_s": rate(len(good), passed),
        "output_tokens_per_s": rate(output, passed),
        "total_tokens_per_s": rate(output + prompt, passed),
        "ttft_ms": ms(row.ttft_s for row in good),
        "tpot_ms": ms(row.tpot_s for row in good if row.tpot_s is not None),
        "e2e_ms": ms(row.e2e_s for row in good),
        "goodput": goodput(rows, slo, passed),
        "prompt_tokens": spread(row.prompt_tokens for row in good),
        "output_tokens": spread(row.output_tokens for row in good),
    }


def samples(rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of ``Samples``; ``rows`` are in order."""
    return {
        "index": [row.index for row in rows],
        "scheduled_s": [round(row.scheduled_s, 6) for row in rows],
        "ttft_ms": [to_ms(row.ttft_s if row.first_s is not None else None) for row in rows],
        "tpot_ms": [to_ms(row.tpot_s) if row.ok else None for row in rows],
        "e2e_ms": [round(1000 * row.e2e_s, 3) for row in rows],
        "prompt_tokens": [row.prompt_tokens for row in rows],
        "output_tokens": [row.output_tokens for row in rows],
        "error": [row.error for row in rows],
    }


def to_ms(seconds: float | None) -> float | None:
    """Of a sample, to the microsecond."""
    return None if seconds is None else round(1000 * seconds, 3)


def _duration(rows: Sequence[Row]) -> float:
    if not rows:
        return 0.0
    ended = max(row.scheduled_s + row.e2e_s for row in rows)
    return ended - min(row.sent_s for row in rows)
