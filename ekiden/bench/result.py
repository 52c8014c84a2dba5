"""The result of a run: what ``--json`` writes, and what every report is made from.

``schema`` changes when a field's meaning does; fields are only ever added under one schema.
Durations are milliseconds in fields that end in ``_ms``, seconds in those that end in ``_s``.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ekiden.core.results import read_result
from ekiden.measures.goodput import Goodput, Slo
from ekiden.measures.spread import Spread

SCHEMA = "ekiden.bench/1"


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


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """A row of values for each request, in the order in which they were due. None: not there."""

    index: list[int]
    scheduled_s: list[float]
    sent_s: list[float]
    ttft_ms: list[float | None]
    """From the scheduled moment in an open loop, from sending in a closed one."""
    tpot_ms: list[float | None]
    itl_std_ms: list[float | None]
    e2e_ms: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    error: list[str]


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Gaps between tokens of about ``ms``."""

    ms: float
    count: int


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the sweep. docs/bench.md defines each figure."""

    name: str
    load: str
    """``rate`` (requests/s), ``concurrency`` or ``trace`` (speed)."""
    value: float | None
    """None: a rate without end, all at once."""
    requests: int
    succeeded: int
    errors: dict[str, int]
    error_details: dict[str, str]
    """The first message of each kind."""
    error_rate: float
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    ttft_from_send_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    itl_jitter_ms: Spread
    e2e_ms: Spread
    e2e_from_send_ms: Spread
    schedule_lag_ms: Spread
    goodput: Goodput | None
    prompt_tokens: Spread
    output_tokens: Spread
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


def read(path: Path) -> Result:
    """A result that was written before.

    Raises:
        SetupError: it cannot be read, is no result, or is one of another schema.
    """
    return read_result(path, {SCHEMA: Result}, "`ekiden bench --json`")
