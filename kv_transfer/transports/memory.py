"""The fake wire: messages between transports of one process, with every fault a wire can show.

Faults are drawn from a seed, so that a failing run can be repeated. Without faults it also
connects ranks that are threads of one process.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections import deque
from contextlib import suppress

import msgspec

from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.errors import ReplicaFailed, SetupError
from kv_transfer.transports.base import Completed, Event, Incoming, PeerLost, Pieces
from kv_transfer.transports.pieces import copy_pieces, first, size_of


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Chances, 0 to 1, of what may happen to a message; times in seconds."""

    seed: int = 0
    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    """One byte differs, and the wire does not notice."""
    half: float = 0.0
    """Half of it is written, then both ends are told of an error."""
    hang: float = 0.0
    """Half of it is written; the rest is written ``late_s`` later, or never if that is 0."""
    late_s: float = 0.0
    delay_s: float = 0.0
    """At most; since each message draws its own, they also change places."""
    register_fails: bool = False


class _Flight:
    """One message under way. ``data`` is the sender's memory, or a copy of it."""

    def __init__(
        self, sender: MemoryTransport, op: int, tag: int, data: Pieces, due: float
    ) -> None:
        self.sender = sender
        self.op = op
        self.tag = tag
        self.data = data
        self.due = due
        self.lost = ""


class _Landing:
    """A receive under way: completes at ``due``, never if that is None."""

    def __init__(self, flight: _Flight, pieces: Pieces, due: float | None, error: str) -> None:
        self.flight = flight
        self.pieces = pieces
        self.due = due
        self.error = error


class Hub:
    """The ether: who is there, by name. One lock for all of it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.members: dict[bytes, MemoryTransport] = {}
        self._names = itertools.count()

    def join(self, transport: MemoryTransport) -> bytes:
        with self.lock:
            name = b"memory:%d" % next(self._names)
            self.members[name] = transport
            return name


HUB = Hub()


class MemoryTransport:
    """See the module. ``faults`` apply to what this end sends."""

    wire = "memory"
    in_place = False

    def __init__(
        self, hub: Hub, *, clock: Clock | None = None, faults: Faults | None = None
    ) -> None:
        self._hub = hub
        self._clock = clock or MonotonicClock()
        self._faults = faults or Faults()
        self._random = random.Random(self._faults.seed)
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fds = (self._signal,)
        self._numbers = itertools.count(1)
        self._peers: dict[int, MemoryTransport] = {}
        self._arriving: list[_Flight] = []
        self._announced: dict[int, _Flight] = {}
        self._landings: dict[int, _Landing] = {}
        self._sends: dict[int, tuple[int, _Flight]] = {}
        self._events: deque[Event] = deque()
        self._closed = False
        self._name = hub.join(self)

    def register(self, arena: memoryview) -> None:
        if self._faults.register_fails:
            raise SetupError(
                f"the memory wire cannot register {arena.nbytes} bytes: it was told to fail"
            )

    def describe(self) -> bytes:
        return self._name

    def connect(self, endpoint: bytes) -> int:
        with self._hub.lock:
            if not endpoint.startswith(b"memory:"):
                raise ReplicaFailed(f"{endpoint!r} is no address of the memory wire")
            other = self._hub.members.get(endpoint)
            for number, known in self._peers.items():
                if known is other:
                    return number
            number = next(self._numbers)
            if other is None:
                self._tell(PeerLost(number, f"nobody is at {endpoint.decode()}"))
            else:
                self._peers[number] = other
            return number

    def send(self, peer: int, tag: int, pieces: Pieces) -> int:
        with self._hub.lock:
            op = next(self._numbers)
            target = self._peers.get(peer)
            if target is None:
                self._tell(Completed(op, "the peer is lost"))
            elif self._happens(self._faults.loss):
                self._tell(Completed(op, ""))
            else:
                flight = _Flight(self, op, tag, pieces, self._due())
                self._sends[op] = (peer, flight)
                self._launch(target, flight)
            return op

    def receive(self, message: int, pieces: Pieces) -> int:
        with self._hub.lock:
            flight = self._announced.pop(message)
            op = next(self._numbers)
            faults, now = flight.sender._faults, self._clock.now()
            half = first(pieces, size_of(pieces) // 2)
            if flight.lost:
                self._tell(Completed(op, flight.lost))
            elif flight.sender._happens(faults.hang):
                copy_pieces(flight.data, half)
                due = now + faults.late_s if faults.late_s else None
                self._landings[op] = _Landing(flight, pieces, due, "")
            elif flight.sender._happens(faults.half):
                copy_pieces(flight.data, half)
                self._land(op, _Landing(flight, (), now, "half of it was lost"))
            else:
                self._land(op, _Landing(flight, pieces, now, ""))
            return op

    def move(self, op: int, buffer: memoryview) -> None:
        with self._hub.lock:
            if op in self._landings:
                self._landings[op].pieces = [buffer]
            elif op in self._sends:
                _, flight = self._sends[op]
                buffer = buffer[: size_of(flight.data)]
                copy_pieces(flight.data, [buffer])
                flight.data = [buffer]

    def discard(self, message: int) -> None:
        with self._hub.lock:
            flight = self._announced.pop(message)
            flight.sender._sent(flight.op, "")

    def poll(self) -> list[Event]:
        with self._hub.lock:
            if self._closed:
                return []
            with suppress(BlockingIOError):
                os.eventfd_read(self._signal)
            self._collect()
            events = list(self._events)
            self._events.clear()
            return events

    def idle(self) -> float:
        with self._hub.lock:
            dues = [f.due for f in self._arriving]
            dues += [x.due for x in self._landings.values() if x.due is not None]
            next_due = min(dues, default=float("inf")) - self._clock.now()
            return 0.0 if self._events else max(next_due, 0.0)

    def disconnect(self, peer: int) -> None:
        with self._hub.lock:
            other = self._peers.get(peer)
            if other is not None:
                self._lose(other, "this end broke the connection")
                other._lose(self, "the other end broke the connection")

    def close(self) -> None:
        """Also what the death of a process looks like to the others."""
        with self._hub.lock:
            self._hub.members.pop(self._name, None)
            for other in list(self._hub.members.values()):
                other._lose(self, "the peer is gone")
            self._landings.clear()
            self._sends.clear()
            self._events.clear()
            self._closed = True
            os.close(self._signal)

    def _launch(self, target: MemoryTransport, flight: _Flight) -> None:
        if size_of(flight.data) and self._happens(self._faults.corrupt):
            data = bytearray().join(flight.data)
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            flight.data = [memoryview(data)]
        target._arriving.append(flight)
        if self._happens(self._faults.duplicate):
            copy = [memoryview(b"".join(flight.data))]
            target._arriving.append(_Flight(self, 0, flight.tag, copy, self._due()))
        target._wake()

    def _collect(self) -> None:
        now = self._clock.now()
        for flight in sorted(self._arriving, key=lambda f: f.due):
            if flight.due <= now:
                self._arriving.remove(flight)
                message = next(self._numbers)
                self._announced[message] = flight
                self._events.append(Incoming(message, flight.tag, size_of(flight.data)))
        for op, landing in list(self._landings.items()):
            if landing.due is not None and landing.due <= now:
                del self._landings[op]
                self._land(op, landing)

    def _land(self, op: int, landing: _Landing) -> None:
        copy_pieces(landing.flight.data, landing.pieces)
        self._tell(Completed(op, landing.error))
        landing.flight.sender._sent(landing.flight.op, landing.error)

    def _sent(self, op: int, error: str) -> None:
        if self._sends.pop(op, None) is not None:
            self._tell(Completed(op, error))

    def _lose(self, other: MemoryTransport, reason: str) -> None:
        """Forget ``other``: what is under way with it ends with an error."""
        self._arriving = [f for f in self._arriving if f.sender is not other]
        for flight in self._announced.values():
            if flight.sender is other:
                flight.lost = reason
        for op, landing in list(self._landings.items()):
            if landing.flight.sender is other:
                del self._landings[op]
                self._tell(Completed(op, reason))
        for number in [n for n, known in self._peers.items() if known is other]:
            del self._peers[number]
            for op in [op for op, (peer, _) in self._sends.items() if peer == number]:
                self._sent(op, reason)
            self._tell(PeerLost(number, reason))

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def _due(self) -> float:
        return self._clock.now() + self._random.uniform(0.0, self._faults.delay_s)

    def _wake(self) -> None:
        if not self._closed:
            os.eventfd_write(self._signal, 1)

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance
