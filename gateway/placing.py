"""Which replicas serve a request, and what is remembered of it: pure code over records and a clock.

Joins routing, bookings, suspects and the prefix guess. The fleet calls it with the registry's
members; the simulator with its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from ekiden.core.clock import Clock
from ekiden.core.hashes import GRANULE
from ekiden.registry.record import UNWELL, ReplicaRecord
from gateway.bookings import Booking, Bookings, Suspects
from gateway.prefix_guess import Life, PrefixGuess
from gateway.routing import Ask, Candidate, Told, best_rate, order_decode, order_prefill

MAX_PREFILL_CANDIDATES = 3
MAX_ATTEMPTS = 3
"""Decode replicas that are asked for one request."""


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of one request. Given back to the placer when the request ends."""

    decode: ReplicaRecord
    prefill: tuple[ReplicaRecord, ...]
    """In the order in which they are asked."""
    bookings: tuple[Booking, ...]
    predicted_cached: int
    """Prompt tokens expected in a cache of the chosen replicas."""


class Placer:
    """What one gateway knows beyond the records."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        *,
        told: Callable[[ReplicaRecord], Told],
        granule: int = GRANULE,
    ) -> None:
        """``told``: between which moments a record's figures were made. ``granule``: tokens of each
        hash that ``place`` is given."""
        self._clock, self._rng = clock, rng
        self._told = told
        self._granule = granule
        self._guess = PrefixGuess()
        self._bookings = Bookings(clock)
        self._suspects = Suspects(clock)
        self._kept: dict[Life, tuple[ReplicaRecord, Candidate]] = {}

    def place(
        self,
        decode: Sequence[ReplicaRecord],
        prefill: Sequence[ReplicaRecord],
        granules: Sequence[bytes],
        ask: Ask,
    ) -> Placed:
        """Choose among usable replicas, at least one of them ``decode``, and book the chosen."""
        first, order = self.choose(
            self._candidates(decode, granules), self._candidates(prefill, granules), ask
        )
        asked = [_with_record(one, prefill) for one in order[:MAX_PREFILL_CANDIDATES]]
        return self._book(_with_record(first, decode), asked, granules, ask)

    def choose(
        self, decode: Sequence[Candidate], prefill: Sequence[Candidate], ask: Ask
    ) -> tuple[Candidate, list[Candidate]]:
        """A decode replica, and the prefill replicas in the order in which to ask them."""
        order = order_prefill(prefill, ask, self._rng, most=MAX_PREFILL_CANDIDATES)
        rate = best_rate(prefill)
        best = order_decode(decode, ask, self._rng, prefill_rate=rate, most=1)[0]
        return best.candidate, [scored.candidate for scored in order]

    def finish(self, placed: Placed, *, worked: bool, prefilled_on: str = "") -> None:
        """The request ended; ``worked``: as it should. ``prefilled_on``: the prefill replica that
        served it, if one did."""
        for booking in placed.bookings:
            self._bookings.release(booking)
        if not worked:
            return
        self._suspects.worked(placed.decode.life)
        if placed.prefill and prefilled_on:
            self._judge_prefill(placed, prefilled_on)

    def first_token(self, placed: Placed) -> None:
        """Its prompt is computed, and prefill is done with it."""
        decode, *prefill = placed.bookings
        self._bookings.computed(decode)
        for booking in prefill:
            self._bookings.release(booking)

    def failed(self, life: Life, *, certain: bool) -> None:
        self._suspects.failed(life, certain=certain)

    def keep_only(self, lives: set[Life]) -> None:
        """Forget every life that is over."""
        self._guess.keep_only(lives)
        self._bookings.keep_only(lives)
        self._suspects.keep_only(lives)
        self._kept = {life: kept for life, kept in self._kept.items() if life in lives}

    def _candidates(
        self, records: Sequence[ReplicaRecord], granules: Sequence[bytes]
    ) -> list[Candidate]:
        return [self._candidate(record, granules) for record in records]

    def _candidate(self, record: ReplicaRecord, granules: Sequence[bytes]) -> Candidate:
        life = record.life
        cached = self._guess.cached(life, granules)
        waits = record.stats.waiting_tokens
        if not (cached or waits or life in self._bookings or self._suspects):
            return self._unburdened(record, life)
        told = self._told(record)
        return Candidate(
            id=record.id,
            epoch=record.epoch,
            block_size=record.block_size,
            stats=record.stats,
            age_s=told.age(self._clock.now()),
            booked=self._bookings.known(life, told),
            cached_tokens=self._granule * cached,
            suspect=life in self._suspects or record.status == UNWELL,
        )

    def _unburdened(self, record: ReplicaRecord, life: Life) -> Candidate:
        """One of which nothing is known but its record; of thousands most are, request after
        request."""
        kept = self._kept.get(life)
        if kept is None or kept[0] is not record:
            candidate = Candidate(
                id=record.id,
                epoch=record.epoch,
                block_size=record.block_size,
                stats=record.stats,
                suspect=record.status == UNWELL,
            )
            self._kept[life] = kept = record, candidate
        return kept[1]

    def _book(
        self,
        decode: tuple[Candidate, ReplicaRecord],
        prefill: Sequence[tuple[Candidate, ReplicaRecord]],
        granules: Sequence[bytes],
        ask: Ask,
    ) -> Placed:
        chosen = (decode, *prefill[:1])
        uncached = [max(ask.prompt - candidate.cached_tokens, 1) for candidate, _ in chosen]
        bookings = [
            self._bookings.book(
                decode[1].life,
                uncached_tokens=0 if prefill else uncached[0],
                kv_tokens=ask.prompt + ask.max_output * ask.choices,
            )
        ]
        if prefill:
            life = prefill[0][1].life
            bookings.append(
                self._bookings.book(life, uncached_tokens=uncached[1], kv_tokens=ask.prompt)
            )
        for _, record in chosen:
            capacity = record.stats.kv_blocks_total * record.block_size // self._granule
            self._guess.add(record.life, granules, capacity=capacity)
        return Placed(
            decode=decode[1],
            prefill=tuple(record for _, record in prefill),
            bookings=tuple(bookings),
            predicted_cached=max(candidate.cached_tokens for candidate, _ in chosen),
        )

    def _judge_prefill(self, placed: Placed, prefilled_on: str) -> None:
        """The one that prefilled works; those asked before it did not."""
        for record in placed.prefill:
            if record.id == prefilled_on:
                self._suspects.worked(record.life)
                return
            self._suspects.failed(record.life, certain=True)


def _with_record(
    candidate: Candidate, records: Sequence[ReplicaRecord]
) -> tuple[Candidate, ReplicaRecord]:
    id, epoch = candidate.id, candidate.epoch
    return candidate, next(one for one in records if one.id == id and one.epoch == epoch)
