"""What this gateway has in flight at each replica, and which replicas just failed."""

from __future__ import annotations

import math

from ekiden.core.clock import Clock
from gateway.prefix_guess import Life
from gateway.routing import Booked, Told

SUSPECT_S = 5.0
_FAILURES = 3


class Booking:
    """One request at one replica. Released exactly when its request ends."""

    def __init__(self, life: Life, at: float, uncached_tokens: int, kv_tokens: int) -> None:
        self.life = life
        self.at = at
        self.uncached_tokens = uncached_tokens
        self.kv_tokens = kv_tokens
        self.computed_at = math.inf
        """Its prompt was."""
        self.released_at = math.inf

    @property
    def open(self) -> bool:
        return self.released_at == math.inf

    @property
    def queued(self) -> bool:
        """Its prompt is not computed yet, as far as this gateway knows."""
        return self.computed_at == math.inf

    def counted(self, told: Told) -> bool:
        """Whether the figures may have it among the replica's requests. One whose prompt is
        computed elsewhere joins them with its first token."""
        begun = self.at if self.uncached_tokens else self.computed_at
        return begun < told.latest and self.released_at >= told.earliest

    def counted_in_queue(self, told: Told) -> bool:
        """The same, among those that wait for their prompt."""
        return self.at < told.latest and self.computed_at >= told.earliest


class _Held:
    """The bookings of one replica, oldest first; those that ended too, while figures count them."""

    def __init__(self) -> None:
        self.bookings: dict[Booking, None] = {}
        self.computed_at = -math.inf
        """When a prompt was last seen computed there."""

    def computing(self) -> Booking | None:
        """What the replica works at: prompts are computed in the order in which they came."""
        queued = (one for one in self.bookings if one.queued and one.uncached_tokens)
        return next(queued, None)

    def forget(self, told: Told, now: float) -> None:
        """Drop what has ended and is in no figures, neither in these nor in those to come."""
        next_earliest = now - (told.latest - told.earliest)
        for booking in [one for one in self.bookings if not one.open]:
            counted = booking.at < told.latest and booking.released_at >= told.earliest
            if not counted and booking.released_at < next_earliest:
                del self.bookings[booking]


class Bookings:
    """By replica life; no more than requests in flight, and those that ended a moment ago."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[Life, _Held] = {}

    def book(self, life: Life, *, uncached_tokens: int, kv_tokens: int) -> Booking:
        """``uncached_tokens``: of the prompt, that the replica will compute; 0 where another one
        does."""
        booking = Booking(life, self._clock.now(), uncached_tokens, kv_tokens)
        self._held.setdefault(life, _Held()).bookings[booking] = None
        return booking

    def computed(self, booking: Booking) -> None:
        """Its prompt is. Saying so twice is harmless."""
        if booking.queued:
            booking.computed_at = self._clock.now()
            if held := self._held.get(booking.life):
                held.computed_at = booking.computed_at

    def release(self, booking: Booking) -> None:
        """Releasing twice is harmless."""
        self.computed(booking)
        booking.released_at = min(booking.released_at, self._clock.now())

    def known(self, life: Life, told: Told) -> Booked:
        """What is in flight at a replica whose last figures are of ``told``."""
        held = self._held.get(life)
        if held is None:
            return Booked()
        held.forget(told, self._clock.now())
        if not held.bookings:
            del self._held[life]
        ours = list(held.bookings)
        head = held.computing()
        return Booked(
            requests=sum(one.open for one in ours),
            uncached_tokens=sum(one.uncached_tokens for one in ours if one.queued),
            kv_tokens=sum(one.kv_tokens for one in ours if one.open and one.at >= told.earliest),
            counted_requests=sum(one.counted(told) for one in ours),
            counted_tokens=sum(one.uncached_tokens for one in ours if one.counted_in_queue(told)),
            computing_tokens=head.uncached_tokens if head else 0,
            computing_s=self._clock.now() - max(head.at, held.computed_at) if head else 0.0,
        )

    def keep_only(self, lives: set[Life]) -> None:
        """Forget every life that is over."""
        for life in [life for life in self._held if life not in lives]:
            del self._held[life]

    def __contains__(self, life: Life) -> bool:
        """Whether it has any."""
        return life in self._held

    @property
    def count(self) -> int:
        """Of requests that have not ended."""
        return sum(one.open for held in self._held.values() for one in held.bookings)


class Suspects:
    """Replicas that failed lately. One that answers again is trusted again at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[Life, float] = {}
        self._failures: dict[Life, int] = {}

    def failed(self, life: Life, *, certain: bool = False) -> None:
        """Count a failure. ``certain``: it is at fault beyond doubt; else three in a row are."""
        self._failures[life] = self._failures.get(life, 0) + 1
        if certain or self._failures[life] >= _FAILURES:
            self._until[life] = self._clock.now() + SUSPECT_S

    def worked(self, life: Life) -> None:
        self._failures.pop(life, None)
        self._until.pop(life, None)

    def __contains__(self, life: Life) -> bool:
        return self._until.get(life, 0.0) > self._clock.now()

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return bool(self._until)

    def keep_only(self, lives: set[Life]) -> None:
        for table in (self._until, self._failures):
            for life in [life for life in table if life not in lives]:
                del table[life]
