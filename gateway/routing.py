"""Which replicas serve a request: the least predicted time. Pure code over a snapshot.

For prefill: the tokens ahead in its queue and the request's own uncached ones, at the rate that
replica was measured at. For decode: those it must get computed before it starts, then the steps
at the batch it would have, and the wait for blocks if its pool is short. Ties break at random.

What is not measured yet is taken to be as good as the best replica of the pool, so that a new
replica is tried at once. Figures are old when they are read: of its own requests a gateway goes by
what it has seen itself, and takes from the figures only what others have there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import nsmallest
from operator import itemgetter

import msgspec

from ekiden.core.types import ReplicaStats

_DEFAULT_PREFILL_RATE = 1000.0
_EXPECTED_OUTPUT = 256
"""Tokens a request is expected to give at most; few answers use their whole ``max_tokens``."""
_FIXED_ROWS = 32
"""Reading the weights takes as much of a decode step as so many rows."""
_DEFAULT_ROW_S = 0.02 / _FIXED_ROWS


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
    best_rate = _best_rate(pool)
    return _ordered([(c, _prefill_s(c, ask, best_rate)) for c in pool], rng, most)


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
    own_rate = _best_rate(pool)
    row_s = min((_row_s(c.stats) for c in pool if c.stats.step_s), default=_DEFAULT_ROW_S)
    rate = prefill_rate or own_rate
    scores = [(c, _prefill_s(c, ask, rate) + _decode_s(c, ask, row_s)) for c in pool]
    return _ordered(scores, rng, most)


def best_rate(pool: Sequence[Candidate]) -> float:
    """Prefill tokens a second of the best measured replica; 0 if none was measured."""
    return max((c.stats.prefill_tokens_per_s for c in pool), default=0.0)


def requests_at(candidate: Candidate) -> int:
    """Requests that a replica has: of this gateway as they are now, of all others as the figures
    have them."""
    stats, booked = candidate.stats, candidate.booked
    return max(stats.running + stats.waiting - booked.counted_requests, 0) + booked.requests


def _best_rate(pool: Sequence[Candidate]) -> float:
    return best_rate(pool) or _DEFAULT_PREFILL_RATE


def _prefill_s(candidate: Candidate, ask: Ask, default_rate: float) -> float:
    rate = candidate.stats.prefill_tokens_per_s or default_rate
    uncached = max(ask.prompt - candidate.cached_tokens, 1)
    return (_ahead(candidate, rate) + uncached) / rate


def _ahead(candidate: Candidate, rate: float) -> float:
    """Tokens to compute before this request's: of this gateway's requests as they are now, of all
    others as the figures have them."""
    stats, booked = candidate.stats, candidate.booked
    others = max(stats.waiting_tokens - booked.counted_tokens, 0)
    computed = min(rate * booked.computing_s, booked.computing_tokens)
    return others + booked.uncached_tokens - computed


def _decode_s(candidate: Candidate, ask: Ask, best_row_s: float) -> float:
    """Steps at the batch the replica would have, plus the wait for blocks it lacks."""
    stats = candidate.stats
    batch = requests_at(candidate) + ask.choices
    # An idle replica's last measurement may be of a full batch: trusting it would keep it idle.
    row_s = _row_s(stats) if stats.step_s and stats.running else best_row_s
    output = min(ask.max_output, _EXPECTED_OUTPUT)
    return row_s * (_FIXED_ROWS + batch) * (output + _steps_until_room(candidate, ask, output))


def _row_s(stats: ReplicaStats) -> float:
    """Seconds that a step takes for each row, those that stand for its fixed part among them."""
    return stats.step_s / (_FIXED_ROWS + stats.running)


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
