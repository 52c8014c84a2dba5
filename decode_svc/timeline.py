"""When each phase of one request began, all on this replica's clock."""

from __future__ import annotations

from ekiden.core.clock import Clock
from ekiden.core.types import TimeSplit


class Timeline:
    """Marks of one request; the phases between them add up to its whole time.

    A phase whose start was never marked takes no time. An attempt that failed counts as queue:
    the prefill that is reported is the one whose KV was used.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._arrived = clock.now()
        self._prefill: float | None = None
        self._first_token: float | None = None
        self._kv_ready: float | None = None
        self._decoding: float | None = None

    def prefill_started(self) -> None:
        """The first chunk was put into a step, here or on a prefill replica."""
        if self._first_token is None:
            self._prefill = self._clock.now()

    def first_token(self) -> None:
        """The hand-off token (or the first local one) is known."""
        if self._first_token is None:
            self._first_token = self._clock.now()

    def kv_ready(self) -> None:
        """The KV is in place, or was given up: the sequence goes back to the engine."""
        self._kv_ready = self._clock.now()

    def tokens(self) -> None:
        """Tokens came out of the engine: the first ones, or those of a decode step."""
        if self._first_token is None:
            self._first_token = self._clock.now()
        elif self._decoding is None:
            self._decoding = self._clock.now()

    @property
    def has_kv(self) -> bool:
        """Whether a hand-off is over, with its KV or without."""
        return self._kv_ready is not None

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_token is None else self._first_token - self._arrived

    def split(self) -> TimeSplit:
        """The time so far, cut at the marks."""
        end = self._clock.now()
        first = end if self._first_token is None else self._first_token
        prefill = first if self._prefill is None else self._prefill
        kv_ready = first if self._kv_ready is None else max(first, self._kv_ready)
        decoding = end if self._decoding is None else max(kv_ready, self._decoding)
        return TimeSplit(
            queue_s=prefill - self._arrived,
            prefill_s=first - prefill,
            transfer_s=kv_ready - first,
            first_decode_s=decoding - kv_ready,
            decode_s=end - decoding,
        )
