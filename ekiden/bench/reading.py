"""One answer while it comes: when its events came, what it counted, how it ended."""

from __future__ import annotations

from array import array
from typing import Any

from ekiden.bench.events import DONE, ErrorEvent, Event, EventLines, Usage
from ekiden.bench.histogram import Histogram


class Reading:
    """A sink of the stream of one request. Moments are those of the clock that gave them."""

    def __init__(self) -> None:
        self.done = False
        self.finished = False
        """A reason to finish was given, or ``[DONE]``: without either the answer was cut off."""
        self.first: float | None = None
        self.last: float | None = None
        """The last event of a choice."""
        self.events = 0
        """With text."""
        self.usage: Usage | None = None
        self.gaps = array("d")
        """Seconds between events with text."""
        self._lines = EventLines()
        self._before = 0.0

    def take(self, when: float, piece: bytes) -> None:
        for data in self._lines.feed(piece):
            if data == DONE:
                self.done = self.finished = True
            else:
                self._event(when, data)

    def _event(self, when: float, data: bytes) -> None:
        event = Event.of(data)
        if event.error is not None:
            raise ErrorEvent(_message(event.error))
        if event.usage is not None:
            self.usage = event.usage
        self.finished = self.finished or event.finishes
        if event.choices:
            self.last = when
        if event.has_text:
            self._text(when)

    def _text(self, when: float) -> None:
        self.events += 1
        if self.first is None:
            self.first = when
        else:
            self.gaps.append(when - self._before)
        self._before = when

    def gaps_histogram(self) -> Histogram:
        found = Histogram()
        for gap in self.gaps:
            found.add(gap)
        return found


def _message(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:500]
