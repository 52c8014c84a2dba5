"""A port's operations under way: which slot each holds, and until when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from ekiden.core.clock import Clock
from kv_transfer.options import PortOptions
from kv_transfer.transports.base import (
    Completed,
    InPlaceTransport,
    MappedTransport,
    Pieces,
    Transport,
)
from kv_transfer.transports.pieces import size_of

if TYPE_CHECKING:  # services set PortOptions and must not load torch for it
    from kv_transfer.staging import Slots

NOTHING = memoryview(b"")

Done = Callable[[int, str], None]
"""(slot, error): the message is through; the slot is given back when the callable returns."""


class _Op(msgspec.Struct):
    """``size``: bytes of the message."""

    session: int
    peer: int
    sends: bool
    slot: int
    size: int
    done: Done
    abandoned_at: float | None = None


class Pace:
    """A bound on bytes per second: what was moved is a debt, and time pays it."""

    def __init__(self, max_bytes_per_s: float, clock: Clock) -> None:
        self._rate = max_bytes_per_s
        self._clock = clock
        self._paid_at = 0.0

    def charge(self, size: int) -> None:
        if self._rate:
            self._paid_at = max(self._paid_at, self._clock.now()) + size / self._rate

    def delay(self) -> float:
        """Seconds until more may move."""
        return max(self._paid_at - self._clock.now(), 0.0) if self._rate else 0.0


class Wire:
    """Sends and receives within the bounds of the slots, of the window of each peer, and of pace.

    ``mapped`` is the transport if its ends read each other's pools, else None.
    """

    def __init__(
        self,
        transport: Transport,
        slots: Slots,
        options: PortOptions,
        clock: Clock,
        pace: Pace | None = None,
    ) -> None:
        self.transport = transport
        self.in_place = cast("InPlaceTransport", transport) if transport.in_place else None
        self.mapped = cast("MappedTransport", transport) if hasattr(transport, "pool") else None
        self.slots = slots
        self.pace = pace or Pace(options.max_bytes_per_s, clock)
        self._options = options
        self._clock = clock
        self._ops: dict[int, _Op] = {}
        self._sends: Counter[int] = Counter()
        self._receives: Counter[int] = Counter()
        self._said: set[int] = set()

    @property
    def quarantined(self) -> int:
        """Slots that the wire still holds for sessions that were given up."""
        return sum(op.abandoned_at is not None for op in self._ops.values())

    # What is sent holds its slot, and its place in the window, until the other end has a slot for
    # it. So neither may keep the other end's messages out: two ends that send to each other would
    # wait for each other.

    def may_receive(self, peer: int) -> bool:
        """May one more message of ``peer`` be taken now?"""
        return self.slots.free > 0 and self._receives[peer] < self._options.window

    def may_send(self, peer: int) -> bool:
        """May one more message go to ``peer`` now? The last slot is left to what arrives."""
        last = self.slots.count > 1 and self.slots.free == 1
        room = self.slots.free > 0 and self._sends[peer] < self._options.window
        return room and not last and not self.pace.delay()

    def send(
        self, session: int, peer: int, tag: int, slot: int, pieces: Pieces, done: Done
    ) -> None:
        """``pieces``: the message, in the slot, or anywhere if the wire is in place."""
        size = size_of(pieces)
        self.pace.charge(size)
        op = self.transport.send(peer, tag, pieces)
        self._started(op, _Op(session, peer, True, slot, size, done))

    def receive(
        self, session: int, peer: int, message: int, slot: int, pieces: Pieces, done: Done
    ) -> None:
        """``pieces``: as for ``send``."""
        op = self.transport.receive(message, pieces)
        self._started(op, _Op(session, peer, False, slot, size_of(pieces), done))

    def say(self, peer: int, tag: int) -> None:
        """Send a message that is nothing but its tag; if it cannot come, the peer is lost."""
        self._said.add(self.transport.send(peer, tag, [NOTHING]))

    def completed(self, event: Completed) -> None:
        """The wire let go of a slot; the session hears of it unless it was given up."""
        if event.op in self._said:
            self._said.discard(event.op)
            return
        op = self._ops.pop(event.op)
        under_way = self._under_way(op)
        under_way[op.peer] -= 1
        if not under_way[op.peer]:
            del under_way[op.peer]
        try:
            if op.abandoned_at is None:
                op.done(op.slot, event.error)
        finally:
            self.slots.give(op.slot)

    def abandon(self, session: int) -> None:
        """Give the session up; its slots stay with the wire until their operations end, and
        nothing else does: the blocks of the cache may be another's in a moment."""
        now = self._clock.now()
        for number, op in self._ops.items():
            if op.session == session and op.abandoned_at is None:
                op.abandoned_at = now
                if self.in_place is not None:
                    self.in_place.move(number, self.slots.bytes(op.slot, op.size))

    def tick(self) -> None:
        """Break the connections that abandoned operations have held for too long."""
        limit = self._clock.now() - self._options.drain_s
        late = {
            op.peer
            for op in self._ops.values()
            if op.abandoned_at is not None and op.abandoned_at <= limit
        }
        for peer in late:
            self.transport.disconnect(peer)

    def _started(self, op: int, entry: _Op) -> None:
        self._ops[op] = entry
        self._under_way(entry)[entry.peer] += 1

    def _under_way(self, op: _Op) -> Counter[int]:
        return self._sends if op.sends else self._receives
