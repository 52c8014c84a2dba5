"""Two ends of a wire in one process, polled in turns. Shared by the tests of the wires."""

from __future__ import annotations

import time
from collections.abc import Callable

from kv_transfer.poller import Poller
from kv_transfer.transports.base import Event, Transport

DEADLINE_S = 10.0
ARENA_BYTES = 16 << 20


class Ends:
    """See the module."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        self.a, self.b = make(), make()
        self._arenas: dict[Transport, memoryview] = {}
        for end in (self.a, self.b):
            self._arenas[end] = memoryview(bytearray(ARENA_BYTES))
            end.register(self._arenas[end])
        self.events: dict[Transport, list[Event]] = {self.a: [], self.b: []}
        self.to_b = self.a.connect(self.b.describe())
        self.to_a = self.b.connect(self.a.describe())

    def buffer(self, end: Transport, size: int) -> memoryview:
        """``size`` bytes of an end's registered memory that nobody else has."""
        taken, self._arenas[end] = self._arenas[end][:size], self._arenas[end][size:]
        return taken

    def pattern(self, size: int, seed: int) -> memoryview:
        """Such bytes of ``a``, filled."""
        taken = self.buffer(self.a, size)
        taken[:] = pattern(size, seed)
        return taken

    @property
    def open(self) -> list[Transport]:
        return list(self.events)

    def close(self, end: Transport) -> None:
        if self.events.pop(end, None) is not None:
            end.close()

    def wait(self, end: Transport, kind: type[Event], count: int = 1) -> list[Event]:
        """The next ``count`` events of ``kind`` at ``end``, taken out."""
        until = time.monotonic() + DEADLINE_S
        while sum(isinstance(e, kind) for e in self.events[end]) < count:
            assert time.monotonic() < until, f"only {self.events} came"
            for other in self.open:
                self.events[other] += poll(other, 0.005)
        found = [e for e in self.events[end] if isinstance(e, kind)][:count]
        for event in found:
            self.events[end].remove(event)
        return found


def poll(end: Transport, timeout_s: float) -> list[Event]:
    """What a port does: look, sleep no longer than the wire allows, look again."""
    if events := end.poll():
        return events
    poller = Poller(end.fds)
    poller.sleep(min(timeout_s, end.idle()))
    poller.close()
    return end.poll()


def pattern(size: int, seed: int) -> memoryview:
    return memoryview(bytearray((i * 7 + seed * 13) % 251 for i in range(256)) * (size // 256 + 1))[
        :size
    ]
