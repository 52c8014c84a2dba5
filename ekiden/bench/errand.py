"""What the parent tells a worker, and what the worker answers: one JSON value a line."""

from __future__ import annotations

import msgspec

from ekiden.bench.asking import Dialect
from ekiden.bench.histogram import Histogram
from ekiden.bench.record import Record
from ekiden.bench.trace import Traced
from ekiden.bench.wording import Wording
from ekiden.bench.workload import Drawn

MAX_LINE = 1 << 26
"""Bytes: a schedule of a few million requests."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asked, and how."""

    url: str
    model: str
    api_key: str = ""
    dialect: Dialect = Dialect()
    wording: Wording = Wording()
    timeout_s: float = 600.0
    """Of a whole request, connecting included."""


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's share of one phase: of the requests ``first``, ``first + step``, ... those that
    ``moments`` (seconds from ``start``) has a moment for; in a closed loop ``count`` of them.
    """

    target: Target
    workload: Drawn | Traced
    first: int
    step: int
    start: float
    """On the monotonic clock, which all processes of a machine share."""
    moments: tuple[float, ...] = ()
    max_in_flight: int = 1
    concurrency: int = 0
    """0: an open loop."""
    count: int = 0
    """Of a closed loop; 0: until ``duration_s`` is over."""
    duration_s: float = 0.0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """A worker has done its errand."""

    gaps: Histogram
    cpu_share: float
    """Of one core, while it lasted: near 1 the client itself was the limit."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A worker could not do its errand at all."""

    why: str


Answer = Record | Finished | Failed
