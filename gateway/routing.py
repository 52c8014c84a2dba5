"""Which replicas serve a request: the least predicted time. Pure code over a snapshot.

For prefill: the tokens ahead in its queue and the request's own uncached ones, at the rate that
replica was measured at. For decode: those it must get computed before it starts, then the steps
at the batch it would have, and the wait for blocks if its pool is short. Ties break at random.

What is not measured yet is taken to be as fast as the pool is, so that a new replica is tried at
once. Figures are old when they are read: of its own requests a gateway goes by what it has seen
itself, and takes from the figures only what others have there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

import msgspec

from ekiden.core.types import ReplicaStats

_DEFAULT_PREFILL_RATE = 1000.0
_EXPECTED_OUTPUT = 256
"""Tokens a request is expected to give at most; few answers use their whole ``max_tokens``."""
_FIXED_ROWS = 64
"""Reading the weights takes as much of a decode step as so many rows."""
_DEFAULT_ROW_S = 0.02 / _FIXED_ROWS
_ALIKE = 1.25
"""Replicas whose speed is within this factor of their pool's mean are taken to be equally fast: so
far apart are measurements of equal machines with unequal work."""
_OTHERS = 0.2
"""For how much a request of another gateway counts in the batch beside one of our own. All gateways
see the same figures for the same second: if they trusted them fully, all would send everything to
the same replica. Each evens out its own requests, so a part of the difference is enough."""


class Told(NamedTuple):
    """A replica's figures were made between these two moments."""

    earliest: float
    latest: float

    def age(self, now: float) -> float:
        """Of the figures, in seconds."""
        return max(0.0, now - (self.earliest + self.latest) / 2)


class Booked(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway has in flight at a replica. Its own requests it knows better than the
    replica's figures, which are old."""

    requests: int = 0
    uncached_tokens: int = 0
    """Of their prompts, not computed yet."""
    kv_tokens: int = 0
    """Of those that came after the figures were made."""
    counted_requests: int = 0
    """Of this gateway, in the figures: they may have ended since."""
    counted_tokens: int = 0
    """Of this gateway, in the figures' waiting tokens: they may be computed by now."""
    computing_tokens: int = 0
    """Of the prompt that the replica works at, and for how long it has."""
    computing_s: float = 0.0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that may be chosen, as it is known now."""

    id: str
    epoch: int
    block_size: int
    stats: ReplicaStats
    age_s: float = 0.0
    """Of the figures."""
    booked: Booked = Booked()
    cached_tokens: int = 0
    """Of this request's prompt, probably in its cache already."""
    suspect: bool = False
    """It failed a request a moment ago, or is unwell: only taken when nothing else is left."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The request to place, in tokens."""

    prompt: int
    max_output: int
    choices: int = 1


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate and its predicted time, in seconds."""

    candidate: Candidate
    seconds: float


def order_prefill(
    pool: Sequence[Candidate], ask: Ask, rng: random.Random, *, most: int | None = None
) -> list[Scored]:
    """Prefill replicas by predicted time to the hand-off token, best first: the first ``most`` of
    them, or all."""
    usual = _usual_rate(pool)
    return _ordered([(c, _prefill_s(c, ask, usual)) for c in pool], rng, most)


def order_decode(
    pool: Sequence[Candidate],
    ask: Ask,
    rng: random.Random,
    *,
    prefill_rate: float = 0.0,
    most: int | None = None,
) -> list[Scored]:
    """Decode replicas by predicted time to the last token, best first: the first ``most`` of them,
    or all.

    ``prefill_rate`` is that of the best prefill replica, 0 where decode prefills by itself.
    """
    usual = _usual_rate(pool)
    row_s = _mean(_row_s(c.stats) for c in pool if c.stats.running) or _DEFAULT_ROW_S
    scores = [
        (c, _prefill_s(c, ask, usual, elsewhere=prefill_rate) + _decode_s(c, ask, row_s))
        for c in pool
    ]
    return _ordered(scores, rng, most)


def best_rate(pool: Sequence[Candidate]) -> float:
    """Prefill tokens a second of the best measured replica; 0 if none was measured."""
    return max((c.stats.prefill_tokens_per_s for c in pool), default=0.0)


def requests_at(candidate: Candidate) -> int:
    """Requests that a replica has: of this gateway as they are now, of all others as the figures
    have them."""
    stats, booked = candidate.stats, candidate.booked
    return max(stats.running + stats.waiting - booked.counted_requests, 0) + booked.requests


def _usual_rate(pool: Sequence[Candidate]) -> float:
    return _mean(c.stats.prefill_tokens_per_s for c in pool) or _DEFAULT_PREFILL_RATE


def _mean(values: Iterable[float]) -> float:
    """Of those that were measured; 0 if none was."""
    found = [value for value in values if value]
    return sum(found) / len(found) if found else 0.0


def _levelled(measured: float, usual: float) -> float:
    """``measured``, or what is usual in the pool where it is about that or is not there."""
    return measured if measured and not usual / _ALIKE <= measured <= usual * _ALIKE else usual


def _prefill_s(candidate: Candidate, ask: Ask, usual: float, *, elsewhere: float = 0.0) -> float:
    """Until the prompt is computed, here or at a rate of ``elsewhere``."""
    rate = _levelled(candidate.stats.prefill_tokens_per_s, usual)
    uncached = max(ask.prompt - candidate.cached_tokens, 1)
    return _ahead(candidate, rate) / rate + uncached / (elsewhere or rate)


def _ahead(candidate: Candidate, rate: float) -> float:
    """Tokens to compute before this request's: of this gateway's requests as they are now, of all
    others what the figures have less what has been computed since. Others' later requests nobody
    tells; they are as likely at any replica."""
    stats, booked = candidate.stats, candidate.booked
    others = max(stats.waiting_tokens - booked.counted_tokens - rate * candidate.age_s, 0)
    return others + booked.uncached_tokens - _computed(booked, rate)


def _computed(booked: Booked, rate: float) -> float:
    """Tokens of the prompt in work that are done. Never all of them: one that takes longer than it
    should, as a very long one does, must not pass for ended."""
    if not booked.computing_tokens:
        return 0.0
    share = rate * booked.computing_s / booked.computing_tokens
    return booked.computing_tokens * (1 - math.exp(-share))


def _decode_s(candidate: Candidate, ask: Ask, usual: float) -> float:
    """Steps at the batch the replica would have, plus the wait for blocks it lacks. ``usual``:
    seconds of a row in the pool."""
    stats = candidate.stats
    own = candidate.booked.requests
    batch = own + _OTHERS * (requests_at(candidate) - own) + ask.choices
    # An idle replica measures nothing new: trusting its last, slow measurement would keep it idle.
    row_s = _levelled(_row_s(stats), usual) if stats.running else usual
    output = min(ask.max_output, _EXPECTED_OUTPUT)
    return row_s * (_FIXED_ROWS + batch) * (output + _steps_until_room(candidate, ask, output))


def _row_s(stats: ReplicaStats) -> float:
    """Seconds of a step for each of its rows, those that stand for its fixed part among them."""
    return stats.step_s / (_FIXED_ROWS + stats.step_rows)


def _steps_until_room(candidate: Candidate, ask: Ask, output: int) -> float:
    """Steps until running requests have freed the blocks that are missing, if any are."""
    stats = candidate.stats
    if not stats.kv_blocks_total:
        return 0.0
    held = stats.kv_blocks_held * candidate.block_size + candidate.booked.kv_tokens
    need = ask.prompt - candidate.cached_tokens + output * ask.choices
    short = held + need - stats.kv_blocks_total * candidate.block_size
    return _EXPECTED_OUTPUT * short / held if short > 0 and held else 0.0


def _ordered(
    scores: Sequence[tuple[Candidate, float]], rng: random.Random, most: int | None
) -> list[Scored]:
    draw = rng.random
    keyed = [(c.suspect, seconds, draw(), c) for c, seconds in scores]
    best = sorted(keyed, key=_KEY) if most is None else nsmallest(most, keyed, key=_KEY)
    return [Scored(candidate=c, seconds=seconds) for _, seconds, _, c in best]


_KEY = itemgetter(0, 1, 2)
