"""Which faults meet which states, for one seed.

Three seeds together kill and pause everything in every state; a fourth and a fifth meet what is
left of the costly pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from chaos_faults import FAULTS, Fault
from chaos_stages import STAGES

Pair = tuple[Fault, str]

CHEAP, COSTLY = 144, 24
"""Pairs of one seed. Costly: a replica is started anew, or a deadline has to pass."""
QUICK_CHEAP, QUICK_COSTLY = 20, 3
SEEDS = 3


def costly(fault: Fault) -> bool:
    starts_anew = fault.ends not in ("", "gateway", "redis") or bool(fault.frozen)
    return starts_anew or "for good" in fault.name or "nothing more" in fault.name


def pairs(*, hosts: bool, link: bool) -> Iterator[Pair]:
    """Every fault in every state it can meet. ``hosts``: hosts can be cut off; ``link``: the KV
    takes a link that can be cut and slowed."""
    for fault in FAULTS.values():
        for state in fault.stages:
            can_break = (hosts or not fault.hosts) and (link or not fault.link)
            if can_break and (link or not STAGES[state].link):
                yield fault, state


def plan(seed: int, *, hosts: bool, link: bool, quick: bool = False) -> list[Pair]:
    """The pairs of one seed in a random order."""
    rng = random.Random(f"plan/{seed}")
    cheap, dear = (QUICK_CHEAP, QUICK_COSTLY) if quick else (CHEAP, COSTLY)
    every = list(pairs(hosts=hosts, link=link))
    deals = (
        ([pair for pair in every if not costly(pair[0])], cheap),
        ([pair for pair in every if costly(pair[0])], dear),
    )
    chosen = [pair for group, count in deals for pair in _share(group, count, seed)]
    rng.shuffle(chosen)
    return chosen


def _share(every: list[Pair], count: int, seed: int) -> list[Pair]:
    """``count`` of them, other ones for the next seed: all are dealt before one comes again, and
    kills before the rest."""
    order = list(every)
    random.Random("deal").shuffle(order)
    order.sort(key=lambda pair: not pair[0].name.startswith("SIGKILL"))
    start = (seed - 1) * count
    return [order[(start + i) % len(order)] for i in range(min(count, len(order)))]
