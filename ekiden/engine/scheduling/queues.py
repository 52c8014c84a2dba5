"""Where sequences wait and run: lists kept in order of priority and arrival."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from ekiden.engine.scheduling.sequence import Gate, Sequence


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class Queues:
    """A living sequence is in exactly one of these, save one that was detached."""

    def __init__(self) -> None:
        self.closed: list[Sequence] = []
        """Hand-offs that have not been told to get ready."""
        self.announced: list[Sequence] = []
        """Hand-offs told to get ready, waiting for their session."""
        self.waiting: list[Sequence] = []
        """May run as soon as there is room."""
        self.reserved: list[Sequence] = []
        """Have their blocks, wait for the KV to be written into them from outside."""
        self.running: list[Sequence] = []
        self.dying: list[Sequence] = []
        """Dead, but a submitted step still uses their blocks."""

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence without blocks where its gate says."""
        match sequence.gate:
            case Gate.CLOSED:
                insort(self.closed, sequence, key=_order)
            case Gate.ANNOUNCED:
                insort(self.announced, sequence, key=_order)
            case Gate.NONE | Gate.OPEN:
                insort(self.waiting, sequence, key=_order)

    def run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_order)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out of whichever list has it."""
        for queue in (self.closed, self.announced, self.waiting, self.reserved, self.running):
            if sequence in queue:
                queue.remove(sequence)
                return

    def seats(self) -> int:
        """Seats taken by what runs and by what will join when its KV has arrived."""
        return sum(sequence.seats for queue in (self.running, self.reserved) for sequence in queue)

    def has_seats(self, sequence: Sequence, most: int) -> bool:
        """Whether ``sequence`` finds seats beside those taken, ``most`` in all."""
        return self.seats() + sequence.seats <= most

    def all(self) -> Iterator[Sequence]:
        for queue in (self.closed, self.announced, self.waiting, self.reserved):
            yield from queue
        yield from self.running
        yield from self.dying
