"""Which faults meet which states, for one seed. Together the seeds meet every pair there is."""

from __future__ import annotations

import random
from collections.abc import Iterator

from chaos_faults import FAULTS, Fault
from chaos_stages import STAGES

Pair = tuple[Fault, str]

CHEAP, COSTLY = 141, 38
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
    chosen = [
        *_share([pair for pair in every if not costly(pair[0])], cheap, seed),
        *_share([pair for pair in every if costly(pair[0])], dear, seed),
    ]
    rng.shuffle(chosen)
    return chosen


def _share(every: list[Pair], count: int, seed: int) -> list[Pair]:
    """``count`` of them, other ones for the next seed: all are dealt before one comes again."""
    order = list(every)
    random.Random("deal").shuffle(order)
    start = seed * count
    return [order[(start + i) % len(order)] for i in range(min(count, len(order)))]
