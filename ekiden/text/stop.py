"""Stop strings in streamed text: found at the first character that completes one.

The engine decides with this matcher when a choice ends, the gateway cuts its text with the same
one; the result depends on the text alone and not on how it was cut into pieces, so they agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StopMatch(msgspec.Struct, frozen=True):
    """``stop`` was completed. ``keep`` is the not yet taken text that comes before it."""

    stop: str
    keep: str


class StopMatcher:
    """Feed text with ``push``; ``take`` what may be shown.

    A match is the stop string whose last character comes first; of several that end at the same
    character, the longest. Text that may yet turn out to begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._free: list[str] = []

    def push(self, text: str, *, armed: bool = True) -> StopMatch | None:
        """Add text. Unarmed (before ``min_tokens``), stop strings that end in it do not count.

        After a match the matcher is spent: it takes no more text.
        """
        if not self._stops:
            self._free.append(text)
            return None
        buffer = self._held + text
        if armed and (match := self._find(buffer, len(self._held))):
            end, stop = match
            keep = self.take() + buffer[: end - len(stop)]
            self._held = ""
            return StopMatch(stop, keep)
        hold = self._hold_from(buffer)
        self._free.append(buffer[:hold])
        self._held = buffer[hold:]
        return None

    def take(self) -> str:
        """The text that can no longer be part of a stop string and has not been taken yet."""
        text = "".join(self._free)
        self._free.clear()
        return text

    def release(self) -> None:
        """No text will come: what was held back may be taken."""
        self._free.append(self._held)
        self._held = ""

    def _find(self, buffer: str, old: int) -> tuple[int, str] | None:
        """(end, stop) of the match that ends first after the ``old`` characters seen before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[0], best[2])

    def _hold_from(self, buffer: str) -> int:
        """Where the longest suffix that begins a stop string starts."""
        longest = max(len(stop) for stop in self._stops) - 1
        for start in range(max(0, len(buffer) - longest), len(buffer)):
            suffix = buffer[start:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return start
        return len(buffer)
