"""What one rank has moved for one session, pair by pair."""

from __future__ import annotations

from collections.abc import Mapping

from ekiden.core.clock import Clock
from kv_transfer.messages import CHECKSUM_MASK, PairTally


class Ledger:
    """``expected``: messages of each (source, target) pair."""

    def __init__(self, expected: Mapping[tuple[int, int], int], clock: Clock) -> None:
        self._expected = dict(expected)
        self._clock = clock
        self._messages = dict.fromkeys(expected, 0)
        self._bytes = dict.fromkeys(expected, 0)
        self._digests = dict.fromkeys(expected, 0)
        self._first: float | None = None
        self._last = 0.0

    def started(self) -> None:
        """The first byte is about to move (later calls change nothing)."""
        if self._first is None:
            self._first = self._last = self._clock.now()

    def add(self, source: int, target: int, size: int, checksum: int) -> None:
        """One more message is through: ``size`` payload bytes."""
        key = (source, target)
        self._messages[key] += 1
        self._bytes[key] += size
        self._digests[key] = (self._digests[key] + checksum) & CHECKSUM_MASK
        self._last = self._clock.now()

    def complete(self, source: int, target: int) -> bool:
        return self._messages[source, target] == self._expected[source, target]

    @property
    def all_complete(self) -> bool:
        return self._messages == self._expected

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def seconds(self) -> float:
        """First byte to last."""
        return self._last - self._first if self._first is not None else 0.0

    def tallies(self) -> tuple[PairTally, ...]:
        return tuple(
            PairTally(source, target, count, self._bytes[key], self._digests[key])
            for key, count in sorted(self._messages.items())
            for source, target in [key]
        )
