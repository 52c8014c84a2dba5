"""The batch that a replica decodes in the long run: it and the time of a token follow from one
another."""

from __future__ import annotations

import math

import msgspec

from ekiden.planner.steps import Stepper
from ekiden.planner.workload import Workload

ROUNDS = 30
"""Of the fixed point of batch and time of a token."""
SETTLED = 1e-3
"""Relative change at which it is taken as found."""
GUESSED = 2e-2
"""The same, where it only says how much of KV is left for a cache."""
TOO_MANY_PROMPTS = "computing the prompts alone takes more than all of its time"


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed point of decoding."""

    running: float
    alone: float
    """Seconds of a decode step without prompts."""
    tpot: float
    costs: tuple[float, ...]
    """Seconds by which a prompt of each kind delays what is decoded."""
    load: float
    """Share of the time that prompts take."""


def steady(
    stepper: Stepper,
    work: Workload,
    rate: float,
    most: float,
    *,
    prompts: bool,
    settled: float = SETTLED,
) -> Mean | str:
    """Batch and time of a token follow from one another. Else why there is no such batch.

    ``rate`` of one replica; ``prompts``: whether it computes them too.

    The search is from the fullest batch down. A prompt costs a small batch more, since it reads
    experts that nobody else did, so a climb from an empty one may pass the point by.
    """
    dp = stepper.replica.layout.dp
    context, output = work.context, work.output

    def at(running: float) -> Mean:
        costs = (0.0,) * len(work.kinds)
        if prompts:
            costs = prompt_costs(stepper, work, running / dp)
        load = rate / dp * work.mean(costs)
        alone = stepper.decode(max(running, 1.0), context).total
        tpot = alone / (1 - load) if load < 1 else math.inf
        wanted = rate * output * tpot
        return Mean(running=wanted, alone=alone, tpot=tpot, costs=costs, load=load)

    found = at(most)
    if found.load >= 1:
        return TOO_MANY_PROMPTS
    if found.running > most:
        return f"it has room for {most:.0f} sequences at once, and more would be under way"
    low, high = 0.0, most
    for _ in range(ROUNDS):
        running = found.running if low < found.running < high else (low + high) / 2
        found = at(running)
        if abs(found.running - running) <= settled * running:
            break
        low, high = (running, high) if found.running > running else (low, running)
    return found


def prompt_costs(stepper: Stepper, work: Workload, running: float) -> tuple[float, ...]:
    """Seconds that a prompt of each kind adds to the steps of a DP group that decodes
    ``running``."""
    fresh = [(kind, work.fresh(kind)) for kind in work.kinds]
    context = work.context
    return tuple(stepper.added(new, kind.prompt - new, running, context) for kind, new in fresh)
