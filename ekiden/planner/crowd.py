"""How many sequences a replica decodes at once, as a distribution.

A birth-death chain: requests come at random, and of n sequences one ends every output x T(n) / n
seconds, T being the time of a token. Where T grows with n, crowds grow by themselves, so that they
are larger and last longer than Poisson's law has it, the more so the nearer a replica is to the
most that it serves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ekiden.planner.queueing import NORMAL
from ekiden.planner.steady import prompt_costs
from ekiden.planner.steps import Stepper
from ekiden.planner.workload import Workload

_STEP = 1.5
"""Ratio of the batches whose times are computed; between them they are taken as linear."""


def quantiles(
    stepper: Stepper, work: Workload, rate: float, most: float, *, prompts: bool
) -> dict[int, float]:
    """Sequences at P50, P95 and P99 of the time; n stands for n - 1/2 to n + 1/2.

    ``rate``: of one replica, which has room for ``most``; ``prompts``: whether it computes them.
    """
    sizes_G, alone_G, cost_G = _times(stepper, work, most, prompts)
    load_G = np.minimum(rate / stepper.replica.layout.dp * cost_G, _FULL)
    n = np.arange(1, max(1, int(most)) + 1)
    token = np.interp(n, sizes_G, alone_G / (1 - load_G))
    weight = np.concatenate([[0.0], np.cumsum(np.log(rate * work.output * token / n))])
    share = np.exp(weight - weight.max())
    below = np.cumsum(share) / share.sum()
    ends = np.arange(len(below)) + 0.5
    return {q: float(max(0.0, np.interp(q / 100, below, ends))) for q in NORMAL}


_FULL = 0.999
"""Load of prompts from which on next to no token is written."""


@lru_cache(maxsize=256)
def _times(
    stepper: Stepper, work: Workload, most: float, prompts: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Batches, seconds of a decode step of each, and seconds that a mean prompt adds to it."""
    sizes = [1.0]
    while sizes[-1] * _STEP < most:
        sizes.append(sizes[-1] * _STEP)
    sizes.append(max(most, 1.0))
    alone = [stepper.decode(size, work.context).total for size in sizes]
    dp, costs = stepper.replica.layout.dp, [0.0] * len(sizes)
    if prompts:
        costs = [work.mean(prompt_costs(stepper, work, size / dp)) for size in sizes]
    return np.array(sizes), np.array(alone), np.array(costs)
