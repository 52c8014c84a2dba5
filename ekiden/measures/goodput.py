"""Requests that kept what was asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ekiden.measures.spread import rate


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep to count for goodput, in ms; 0: not asked."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    e2e_ms: float = 0.0


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every part of the SLO."""

    requests_per_s: float
    share: float
    """Of all that were sent, failed ones among them."""


class Ended(Protocol):
    """A request that has ended, however it ended. Times in seconds."""

    @property
    def ok(self) -> bool: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def e2e_s(self) -> float: ...


def meets(row: Ended, slo: Slo) -> bool:
    """An answer of one token has no TPOT, and so meets any."""
    if not row.ok:
        return False
    kept = ((slo.ttft_ms, row.ttft_s), (slo.tpot_ms, row.tpot_s or 0.0), (slo.e2e_ms, row.e2e_s))
    return all(not limit or 1000 * value <= limit for limit, value in kept)


def goodput(rows: Sequence[Ended], slo: Slo, passed: float) -> Goodput | None:
    """Over ``passed`` seconds; None where nothing is asked, or nobody asked."""
    if slo == Slo() or not rows:
        return None
    count = sum(meets(row, slo) for row in rows)
    return Goodput(requests_per_s=rate(count, passed), share=count / len(rows))
