"""What an HTML report draws of a plan: lines and bars, as plain numbers."""

from __future__ import annotations

import math

from ekiden.planner import flags
from ekiden.planner.decision import Decision
from ekiden.planner.evaluate import after_losing
from ekiden.planner.memory import TERMS
from ekiden.planner.options import Option
from ekiden.planner.report import ordered

Points = list[tuple[float, float]]
SHOWN = 5
"""Deployments in one picture: the chosen one, and the best of the others."""
STEPS = 24
"""Rates at which each is computed."""
OVER = 3
"""Times the objective at which a line ends."""
BEYOND = 1.3
"""Times the rate of the plan up to which lines go, where they do not end before."""


def drawn(decision: Decision) -> list[Option]:
    """The chosen one first, then the best of what lost in the same format."""
    form = decision.chosen.form
    others = [one for one in ordered(decision) if one.form == form and not one.refused]
    return [decision.chosen, *others[: SHOWN - 1]]


def frontier(decision: Decision) -> dict[str, Points]:
    """Requests a second against TTFT P95 in ms, up to where each deployment cannot keep up, or is
    far over the objective."""
    most = BEYOND * max(option.rate for option in drawn(decision))
    rates = [most * step / STEPS for step in range(1, STEPS + 1)]
    goal = decision.asked.objectives.ttft_p95 or math.inf
    found: dict[str, Points] = {}
    for option in drawn(decision):
        pairs = [(rate, after_losing(decision.asked, option, rate).ttft_p95) for rate in rates]
        found[option.name] = [(x, y * 1e3) for x, y in pairs if y < OVER * goal]
    return found


def memory_bars(decision: Decision) -> dict[str, dict[str, float]]:
    """GiB of the tightest GPU by term, for each replica that was considered and fits."""
    found: dict[str, dict[str, float]] = {}
    for option in drawn(decision):
        for layout in option.layouts:
            sums = decision.asked.stepper(layout, option.form).memory
            rank = sums.ranks[sums.tightest]
            terms = {name: getattr(rank, name) / (1 << 30) for name in TERMS}
            found[str(layout)] = {**terms, "KV": rank.kv / (1 << 30)}
    return found


def kv_lines(decision: Decision) -> dict[str, Points]:
    """Sequences of the workload's mean context on a replica against thousands of tokens of KV,
    and the room that there is."""
    layout = list(flags.pools(decision.chosen).values())[-1][1]
    stepper = decision.asked.stepper(layout, decision.chosen.form)
    work, room = decision.asked.work, stepper.tokens
    most = max(2.0, 1.2 * room / work.context)
    ends = (0.0, most)
    return {
        f"mean context, {work.context:.0f} tokens": [(n, n * work.context / 1e3) for n in ends],
        f"longest, {work.longest} tokens": [
            (n, n * work.longest / 1e3) for n in (0.0, min(most, 1.2 * room / work.longest))
        ],
        "room": [(n, room / 1e3) for n in ends],
    }
