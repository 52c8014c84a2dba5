"""The result of a run: what ``--json`` writes, and what every report is made from.

``schema`` changes when a field's meaning does; fields are only ever added under one schema.
Durations are milliseconds in fields that end in ``_ms``, seconds in those that end in ``_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ekiden.core.results import read_result
from ekiden.measures import run
from ekiden.measures.goodput import Slo
from ekiden.measures.spread import Spread

SCHEMA = "ekiden.bench/1"
SIMULATED = "ekiden.sim/1"


class ReplicaShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica had of a level's requests, as the answers told."""

    role: str
    replica: str
    requests: int
    tokens: int
    """Output tokens of a decode replica, prompt tokens of a prefill replica."""
    tp: int = 0
    """How its ranks split the model; 0: not told, as ``pp``."""
    pp: int = 0


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What our own services tell of themselves, beyond what any client sees."""

    prompt_sources: dict[str, int] = {}
    """Prompt tokens by where their KV came from."""
    cache_hit_share: float = 0.0
    phases_ms: dict[str, Spread] = {}
    replicas: list[ReplicaShare] = []
    imbalance: dict[str, float] = {}
    """Of each role: the tokens of its busiest replica over the mean; 1 is even."""
    fallbacks: dict[str, int] = {}
    wires: dict[str, int] = {}
    """KV bytes handed over by each wire."""
    gauges: dict[str, dict[str, Spread]] = {}
    """What the metrics showed while the level ran, one reading a second: by name, then by replica
    (and stage); ``""`` is the gateway."""


class Samples(run.Samples, frozen=True, kw_only=True):
    """With what only a client can measure."""

    sent_s: list[float]
    itl_std_ms: list[float | None]


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Gaps between tokens of about ``ms``."""

    ms: float
    count: int


class Level(run.Run, frozen=True, kw_only=True):
    """One step of the sweep. docs/bench.md defines each figure."""

    load: str
    """``rate`` (requests/s), ``concurrency`` or ``trace`` (speed)."""
    value: float | None
    """None: a rate without end, all at once."""
    error_details: dict[str, str]
    """The first message of each kind."""
    ttft_from_send_ms: Spread
    itl_ms: Spread
    itl_jitter_ms: Spread
    e2e_from_send_ms: Spread
    schedule_lag_ms: Spread
    short_answers: int
    """With fewer tokens than were asked for."""
    counted_by_server: bool
    client_cpu_share: float
    """The busiest process of the load."""
    service: Service | None
    notes: list[str]
    itl_histogram: list[Bucket]
    samples: Samples


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    schema: str = SCHEMA
    version: str
    started: str
    """UTC, ISO 8601."""
    url: str
    model: str
    endpoint: str
    workload: str
    arrival: str
    """``poisson``, ``constant``, ``burst``, ``trace``, or ``closed``: after the one before."""
    seed: int
    processes: int
    prompts: str
    """How prompts got their length, and whether the server agreed."""
    slo: Slo
    notes: list[str]
    levels: list[Level]


def write(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(result) + b"\n")


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What `ekiden sim --json` wrote, as far as it can be compared with a result."""

    model: str
    workload: str
    arrival: str
    seed: int
    runs: list[run.Run]

    @property
    def levels(self) -> list[run.Run]:
        return self.runs


def read(path: Path) -> Result:
    """A result that was written before.

    Raises:
        SetupError: it cannot be read, is no result, or is one of another schema.
    """
    return read_result(path, {SCHEMA: Result}, "`ekiden bench --json`")


def read_either(path: Path) -> Result | Simulated:
    """The same, measured or simulated."""
    either: Mapping[str, type[Result | Simulated]] = {SCHEMA: Result, SIMULATED: Simulated}
    return read_result(path, either, "`ekiden bench --json` or `ekiden sim --json`")
