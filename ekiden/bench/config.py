"""What a run measures, as the command line has it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ekiden.bench.asking import Dialect
from ekiden.bench.trace import Traced
from ekiden.bench.workload import Drawn
from ekiden.measures.goodput import Slo


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One level's load. ``kind``: ``rate``, ``concurrency`` or ``trace``."""

    kind: str
    value: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.value:g}"


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One server, one workload, one or more loads."""

    url: str
    model: str = ""
    api_key: str = ""
    dialect: Dialect = Dialect()
    tokenizer: Path | None = None
    workload: Drawn | Traced
    workload_name: str
    loads: tuple[Load, ...]
    arrival: str = "poisson"
    burst: int = 1
    seed: int = 0
    count: int = 100
    """Requests of a level; 0: as many as come within ``duration_s``."""
    duration_s: float = 0.0
    warmups: int = 4
    processes: int = 1
    max_in_flight: int = 1024
    timeout_s: float = 600.0
    slo: Slo = Slo()
