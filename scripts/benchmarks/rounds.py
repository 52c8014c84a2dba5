"""Turns: every engine in every round, so that a change of the machine's mood meets all of them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks.contenders import Contender
from benchmarks.results import figure
from benchmarks.work import Work
from benchmarks.worker import WorkerFailed

SETTLE_S = 0.3
"""Between two engines: thread pools spin for a while after their last task."""

Heard = Callable[[Contender], None]


class Plan(NamedTuple):
    """How much is measured."""

    rounds: int
    steps: int
    """Decode steps of one engine in one round."""

    @property
    def stream_tokens(self) -> int:
        """Output tokens a stream is asked for: what is run, the warm-up, and some to spare."""
        return (self.rounds + 2) * self.steps + 16


def alternate(
    contenders: Sequence[Contender], work: Work, plan: Plan, heard: Heard = lambda contender: None
) -> dict[str, list[float]]:
    """Tokens a second of each engine in each round, after one round of warm-up.

    An engine that fails is told of and left out. ``heard`` is called after each run that counts.
    """
    running = [c for c in contenders if _works(c, lambda c: c.open(work, plan.stream_tokens))]
    rates: dict[str, list[float]] = {contender.name: [] for contender in running}
    for number in range(plan.rounds + 1):
        told: dict[str, float] = {}
        for contender in turned(running, number):
            if (rate := _run(contender, work, plan.steps)) is None:
                running.remove(contender)
                del rates[contender.name]
                continue
            told[contender.name] = rate
            if number:
                rates[contender.name].append(rate)
                heard(contender)
        _tell(work, number, plan.rounds, told)
    for contender in running:
        _works(contender, lambda c: c.close(work))
    return rates


def turned(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The same in another order each round: who comes after whom may matter."""
    start = number % max(1, len(contenders))
    return [*contenders[start:], *contenders[:start]]


def medians(rates: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in rates.items() if found}


def spread(rates: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(rates) - min(rates)) / statistics.median(rates)


def widest_spread(measured: Iterable[dict[str, list[float]]]) -> float:
    """Of any engine in any piece of work; 0 where nothing was measured."""
    return max((spread(found) for of in measured for found in of.values() if found), default=0.0)


def _run(contender: Contender, work: Work, steps: int) -> float | None:
    time.sleep(SETTLE_S)
    try:
        return contender.run(work, steps)
    except WorkerFailed as failure:
        _leave_out(contender, failure)
        return None


def _works(contender: Contender, do: Callable[[Contender], None]) -> bool:
    try:
        do(contender)
    except WorkerFailed as failure:
        _leave_out(contender, failure)
        return False
    return True


def _leave_out(contender: Contender, failure: WorkerFailed) -> None:
    print(f"{contender.name} is left out: {failure}", file=sys.stderr)


def _tell(work: Work, number: int, rounds: int, told: dict[str, float]) -> None:
    """One line a round."""
    which = f"round {number} of {rounds}" if number else "warm-up"
    said = ", ".join(f"{name} {figure(rate)}" for name, rate in told.items())
    print(f"{work}, {which}: {said} tokens/s", file=sys.stderr, flush=True)
