"""What this gateway has in flight at each replica, and which replicas just failed."""

from __future__ import annotations

from ekiden.core.clock import Clock
from gateway.prefix_guess import Life
from gateway.routing import Booked

SUSPECT_S = 5.0
_FAILURES = 3


class Booking:
    """One request at one replica. Released exactly when its request ends."""

    def __init__(self, life: Life, at: float, uncached_tokens: int, kv_tokens: int) -> None:
        self.life = life
        self.at = at
        self.uncached_tokens = uncached_tokens
        self.kv_tokens = kv_tokens


class Bookings:
    """Open bookings by replica life; no more than requests in flight."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[Life, set[Booking]] = {}

    def book(self, life: Life, *, uncached_tokens: int, kv_tokens: int) -> Booking:
        booking = Booking(life, self._clock.now(), uncached_tokens, kv_tokens)
        self._open.setdefault(life, set()).add(booking)
        return booking

    def release(self, booking: Booking) -> None:
        """Releasing twice is harmless."""
        held = self._open.get(booking.life)
        if held is not None:
            held.discard(booking)
            if not held:
                del self._open[booking.life]

    def since(self, life: Life, moment: float) -> Booked:
        """The sum of the open bookings made at or after ``moment``."""
        recent = [booking for booking in self._open.get(life, ()) if booking.at >= moment]
        return Booked(
            requests=len(recent),
            uncached_tokens=sum(booking.uncached_tokens for booking in recent),
            kv_tokens=sum(booking.kv_tokens for booking in recent),
        )

    def __contains__(self, life: Life) -> bool:
        """Whether it has any."""
        return life in self._open

    @property
    def count(self) -> int:
        return sum(len(held) for held in self._open.values())


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
