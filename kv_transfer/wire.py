"""A port's operations under way: which slot each holds, and until when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ekiden.core.clock import Clock
from kv_transfer.transports.base import Completed, Transport

if TYPE_CHECKING:  # services set PortOptions and must not load torch for it
    from kv_transfer.staging import Slots

Done = Callable[[int, str], None]
"""(slot, error): the message is through; the slot is given back when the callable returns."""


class PortOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``PortContext.options``, as msgpack: what a service sets for its ports. Times in seconds."""

    transport: str = "ucx"
    slots: int = 16
    """Staging slots of a rank, each of ``reshard.MESSAGE_BYTES`` and a trailer."""
    window: int = 4
    """Messages under way with one peer: a peer that stands still cannot take all the slots."""
    drain_s: float = 5.0
    """After a session was given up, for its operations to end before the connection is broken."""
    limbo_s: float = 60.0
    """A message may be this much earlier than the order that announces its session."""


class _Op(msgspec.Struct):
    session: int
    peer: int
    slot: int
    done: Done
    abandoned_at: float | None = None


class Wire:
    """Sends and receives within the bounds of the slots and of the window of each peer."""

    def __init__(
        self, transport: Transport, slots: Slots, options: PortOptions, clock: Clock
    ) -> None:
        self.transport = transport
        self.slots = slots
        self._options = options
        self._clock = clock
        self._ops: dict[int, _Op] = {}
        self._under_way: Counter[int] = Counter()

    @property
    def quarantined(self) -> int:
        """Slots that the wire still holds for sessions that were given up."""
        return sum(op.abandoned_at is not None for op in self._ops.values())

    def room(self, peer: int) -> bool:
        """May one more message of ``peer`` start now?"""
        return self.slots.free > 0 and self._under_way[peer] < self._options.window

    def send(self, session: int, peer: int, tag: int, slot: int, size: int, done: Done) -> None:
        op = self.transport.send(peer, tag, self.slots.bytes(slot, size))
        self._started(op, _Op(session, peer, slot, done))

    def receive(
        self, session: int, peer: int, message: int, slot: int, size: int, done: Done
    ) -> None:
        op = self.transport.receive(message, self.slots.bytes(slot, size))
        self._started(op, _Op(session, peer, slot, done))

    def completed(self, event: Completed) -> None:
        """The wire let go of a slot; the session hears of it unless it was given up."""
        op = self._ops.pop(event.op)
        self._under_way[op.peer] -= 1
        if not self._under_way[op.peer]:
            del self._under_way[op.peer]
        try:
            if op.abandoned_at is None:
                op.done(op.slot, event.error)
        finally:
            self.slots.give(op.slot)

    def abandon(self, session: int) -> None:
        """Give the session up; its slots stay with the wire until their operations end."""
        now = self._clock.now()
        for op in self._ops.values():
            if op.session == session and op.abandoned_at is None:
                op.abandoned_at = now

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
        self._under_way[entry.peer] += 1
