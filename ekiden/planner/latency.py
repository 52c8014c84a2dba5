"""What a deployment does under load, at percentiles."""

from __future__ import annotations

import math

import msgspec

from ekiden.planner.batch import Split
from ekiden.planner.workload import Objectives


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Percentiles over requests; infinite where the deployment cannot keep up."""

    ttft_p50: float = math.inf
    ttft_p95: float = math.inf
    ttft_p99: float = math.inf
    tpot_p50: float = math.inf
    tpot_p95: float = math.inf
    tpot_p99: float = math.inf
    running: float = 0.0
    """Sequences decoded at once on a replica (of the decode pool), on average."""
    most: float = 0.0
    """For which it has room."""
    prefill_load: float = 0.0
    """Share of the time for which prompts are computed."""
    stall: float = 0.0
    """Longest gap between two tokens that a prompt causes: one full chunk."""
    transfer: float = 0.0
    """Seconds for which the second token waits for KV to move."""
    link_load: float = 0.0
    """Share of the link between the pools that KV takes."""
    decode: Split = Split()
    """One decode step of the mean batch."""
    prefill: Split = Split()
    """One mean prompt."""
    limit: str = ""
    """What it cannot keep up with; empty where it can."""

    def missed(self, objectives: Objectives) -> dict[str, float]:
        """Objectives that are not met, with how many times over they are."""
        over = {name: getattr(self, name) / most for name, most in objectives.stated().items()}
        return {name: times for name, times in over.items() if times > 1}
