"""What wires over stream sockets share: who is connected, and messages as frames.

- An end listens, and dials every peer it is told to connect to; what it sends goes over the
  connection it dialled. An endpoint carries a random key and travels over authenticated gRPC; who
  dials must show it first, or is turned away before anything else of it is read.
- A small message goes with its payload. A large one is offered, and sent when the receiver has a
  buffer for it: it may be taken in any order, and a receiver without room holds up nobody else.
- The loss of either connection of a peer is the loss of the peer; the system tells of a process
  that died at once. A peer that only stops is found by the deadlines of sessions.
"""

from __future__ import annotations

import hmac
import itertools
import math
import secrets
import select
import socket
from functools import partial

import msgspec

from ekiden.core.clock import MonotonicClock
from ekiden.core.errors import ReplicaFailed
from kv_transfer.transports.base import Completed, Event, Incoming, PeerLost, Pieces
from kv_transfer.transports.frames import Broken, Connection, Frame, Kind
from kv_transfer.transports.pieces import copy_pieces, size_of

EAGER_BYTES = 16 << 10
LIMITS: dict[int, int] = {Kind.HELLO: 1 << 16, Kind.WELCOME: 0, Kind.EAGER: EAGER_BYTES}
"""Payload that comes unasked, at most."""
GREETING_S = 15.0
"""For a connection to be made and the other end to show who it is. On a machine that is short of
processors a peer, or this end itself, may well not be heard for some seconds."""
BUDGET = 8 << 20
"""Bytes read from one connection before the others have their turn."""
DEAF_S = 0.1
"""After a caller who could not be let in, before the next is."""
MAX_STRANGERS = 256
KEY_BYTES = 16


class Message(msgspec.Struct):
    """Announced, not yet received: ``payload`` is here already, or waits at the sender."""

    connection: Connection
    op: int
    size: int
    place: int
    payload: memoryview | None


class _Sending(msgspec.Struct):
    """``taken``: its payload is on its way."""

    peer: int
    pieces: Pieces
    taken: bool


class StreamTransport:
    """A wire over ``listener``; ``address`` is how others dial it, ``magic`` the wire's name."""

    in_place = False

    def __init__(self, magic: bytes, listener: socket.socket, address: bytes) -> None:
        self._magic = magic
        self._key = secrets.token_bytes(KEY_BYTES)
        self._endpoint = magic + self._key + address
        self._listener = listener
        listener.setblocking(False)
        self._clock = MonotonicClock()
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self.fds = (self._epoll.fileno(),)
        self._numbers = itertools.count(1)
        self._connections: dict[int, Connection] = {}
        self._greeting: dict[Connection, float] = {}
        self._deaf_until = math.inf
        self._peers: dict[int, Connection] = {}
        self._addresses: dict[bytes, int] = {}
        self._sends: dict[int, _Sending] = {}
        self._messages: dict[int, Message] = {}
        self._takings: dict[tuple[Connection, int], tuple[int, Pieces]] = {}
        self._events: list[Event] = []

    @property
    def wire(self) -> str:
        return self._magic.decode()

    def register(self, arena: memoryview) -> None:
        """Sockets take any memory."""

    def describe(self) -> bytes:
        return self._endpoint

    def connect(self, endpoint: bytes) -> int:
        if (known := self._addresses.get(endpoint)) is not None:
            return known
        head = len(self._magic)
        if not endpoint.startswith(self._magic) or len(endpoint) <= head + KEY_BYTES:
            raise ReplicaFailed(
                f"a KV endpoint of {len(endpoint)} bytes is no address of the {self.wire} wire"
            )
        key, address = endpoint[head : head + KEY_BYTES], endpoint[head + KEY_BYTES :]
        number = next(self._numbers)
        try:
            connection = Connection(self._dial(address), peer=endpoint)
        except OSError as error:
            reason = f"cannot connect to {self._shown(address)}: {error.strerror or error}"
            self._events.append(PeerLost(number, reason))
            return number
        except (ValueError, OverflowError, TypeError) as error:
            raise ReplicaFailed(
                f"{self._shown(address)} is no address of the {self.wire} wire: {error}"
            ) from error
        self._peers[number] = connection
        self._addresses[endpoint] = number
        self._adopt(connection)
        connection.put(Kind.HELLO, payload=[memoryview(key + self._endpoint)])
        self._write(connection)
        return number

    def send(self, peer: int, tag: int, pieces: Pieces) -> int:
        op, size = next(self._numbers), size_of(pieces)
        connection = self._peers.get(peer)
        if connection is None:
            self._events.append(Completed(op, "the connection is lost"))
            return op
        self._sends[op] = _Sending(peer, pieces, taken=size <= EAGER_BYTES)
        if size <= EAGER_BYTES:
            done = partial(self._sent, op)
            connection.put(Kind.EAGER, op=op, tag=tag, payload=pieces, done=done)
        else:
            place = self._place(pieces)
            connection.put(Kind.OFFER, op=op, tag=tag, size=size, place=place)
        self._write(connection)
        return op

    def receive(self, message: int, pieces: Pieces) -> int:
        op = next(self._numbers)
        found = self._messages.pop(message)
        if found.payload is not None:
            copy_pieces([found.payload], pieces)
            self._events.append(Completed(op, ""))
        elif found.connection.closed:
            self._events.append(Completed(op, "the connection is lost"))
        else:
            self._take(found, op, pieces)
        return op

    def move(self, op: int, buffer: memoryview) -> None:
        if (sending := self._sends.get(op)) is not None:
            if sending.taken:
                self._peers[sending.peer].move_out(op, buffer)
            else:
                copy_pieces(sending.pieces, [buffer])
            sending.pieces = [buffer]
        for key, (receive, pieces) in self._takings.items():
            if receive == op:
                self._takings[key] = (op, [buffer])
                key[0].move_in(pieces, buffer)

    def discard(self, message: int) -> None:
        found = self._messages.pop(message)
        if found.payload is None and not found.connection.closed:
            self._let_go(found.connection, found.op)

    def poll(self) -> list[Event]:
        for fd, mask in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                if mask & ~select.EPOLLOUT:
                    self._read(connection)
                if mask & select.EPOLLOUT and not connection.closed:
                    self._write(connection)
        self._turn_away()
        if self._deaf_until <= self._clock.now():
            self._epoll.modify(self._listener, select.EPOLLIN)
            self._deaf_until = math.inf
        events, self._events = self._events, []
        return events

    def idle(self) -> float:
        if self._events:
            return 0.0
        until = min(self._greeting.values(), default=math.inf)
        until = min(until, self._deaf_until)
        return max(until - self._clock.now(), 0.0)

    def disconnect(self, peer: int) -> None:
        if (connection := self._peers.get(peer)) is not None:
            self._lose(connection, "this end broke the connection")

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._lose(connection, "the wire was closed")
        self._listener.close()
        self._epoll.close()

    # What the kinds of socket differ in.

    def _dial(self, address: bytes) -> socket.socket:
        """A socket on its way to ``address``, non-blocking. Raises OSError."""
        raise NotImplementedError

    def _shown(self, address: bytes) -> str:
        return address.decode(errors="replace")

    def _place(self, pieces: Pieces) -> int:
        """Where an offered message lies, for a receiver that can read there."""
        return 0

    def _take(self, found: Message, op: int, pieces: Pieces) -> None:
        """Have an offered message come into ``pieces``."""
        self._takings[found.connection, found.op] = (op, pieces)
        found.connection.put(Kind.TAKE, op=found.op)
        self._write(found.connection)

    def _gone(self, endpoint: bytes) -> None:
        """A peer is lost."""

    def _welcome(self, connection: Connection) -> None:
        """A peer has shown that it may be here."""
        connection.put(Kind.WELCOME)

    def _welcomed(self, connection: Connection) -> None:
        """The peer has taken us in."""

    # Connections.

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # it has gone already
        except OSError:
            # There are no more descriptors: the caller waits, and to look at once again would spin.
            self._epoll.modify(self._listener, 0)
            self._deaf_until = self._clock.now() + DEAF_S
            return
        if len(self._greeting) >= MAX_STRANGERS:
            sock.close()
            return
        self._adopt(Connection(sock))

    def _adopt(self, connection: Connection) -> None:
        self._connections[connection.sock.fileno()] = connection
        self._greeting[connection] = self._clock.now() + GREETING_S
        self._epoll.register(connection.sock, select.EPOLLIN)

    def _turn_away(self) -> None:
        now = self._clock.now()
        for connection in [c for c, until in self._greeting.items() if until <= now]:
            self._lose(connection, f"nobody answered within {GREETING_S:g} s")

    def _watch(self, connection: Connection) -> None:
        out = select.EPOLLOUT if connection.waiting_to_write else 0
        self._epoll.modify(connection.sock, select.EPOLLIN | out)

    def _write(self, connection: Connection) -> None:
        """Write what can be written; watch for room if something is left."""
        try:
            connection.flush()
        except Broken as broken:
            self._lose(connection, str(broken))
            return
        self._watch(connection)

    def _lose(self, connection: Connection, reason: str) -> None:
        """The connection, and with it everything that goes on with the peer behind it."""
        lost = [c for c in self._connections.values() if _same_peer(c, connection)]
        for gone in lost:
            self._connections.pop(gone.sock.fileno())
            self._greeting.pop(gone, None)
            self._epoll.unregister(gone.sock)
            gone.close()
        for key in [key for key in self._takings if key[0] in lost]:
            op, _ = self._takings.pop(key)
            self._events.append(Completed(op, reason))
        if connection.peer:
            self._gone(connection.peer)
        number = self._addresses.pop(connection.peer, None)
        if number is None:
            return
        del self._peers[number]
        for op in [op for op, sending in self._sends.items() if sending.peer == number]:
            del self._sends[op]
            self._events.append(Completed(op, reason))
        self._events.append(PeerLost(number, reason))

    def _let_go(self, connection: Connection, op: int) -> None:
        """Tell the sender of an offered message that its payload is not needed any more."""
        connection.put(Kind.DROP, op=op)
        self._write(connection)

    # Frames.

    def _read(self, connection: Connection) -> None:
        try:
            for frame, payload in connection.frames(partial(self._room, connection), BUDGET):
                self._heard(connection, frame, payload)
                if connection.closed:
                    return
        except Broken as broken:
            self._lose(connection, str(broken))

    def _room(self, connection: Connection, frame: Frame) -> Pieces:
        """Memory for what comes behind a frame's header; refuses what nobody should send."""
        kind, size = frame.kind, frame.size
        # Who dialled says hello, once, and is welcomed: neither can be turned about or repeated.
        greeting = Kind.WELCOME if connection.dialled else Kind.HELLO
        if not connection.ready and kind != greeting:
            raise Broken("the other end did not show who it is")
        if connection.ready and kind in (Kind.HELLO, Kind.WELCOME):
            raise Broken("the other end greeted again")
        if kind == Kind.DATA:
            taking = self._takings.get((connection, frame.op))
            if taking is None or size_of(taking[1]) != size:
                raise Broken("the other end sent data that nobody asked for")
            return taking[1]
        if kind in (Kind.OFFER, Kind.TAKE, Kind.DROP):
            return ()
        if size > LIMITS.get(kind, -1):
            raise Broken(f"the other end sent a frame of kind {kind} with {size} bytes")
        return (memoryview(bytearray(size)),)

    def _heard(self, connection: Connection, frame: Frame, payload: Pieces) -> None:
        kind = frame.kind
        if kind == Kind.HELLO:
            self._greeted(connection, bytes(payload[0]))
        elif kind == Kind.WELCOME:
            self._greeting.pop(connection, None)
            connection.ready = True
            self._welcomed(connection)
            self._write(connection)
        elif kind == Kind.EAGER:
            self._announce(connection, frame, payload[0])
        elif kind == Kind.OFFER:
            self._announce(connection, frame, None)
        elif kind == Kind.TAKE:
            self._taken(connection, frame.op)
        elif kind == Kind.DROP:
            self._dropped(connection, frame.op)
        else:
            op, _ = self._takings.pop((connection, frame.op))
            self._events.append(Completed(op, ""))

    def _greeted(self, connection: Connection, payload: bytes) -> None:
        key, endpoint = payload[:KEY_BYTES], payload[KEY_BYTES:]
        if not hmac.compare_digest(key, self._key):
            raise Broken("the other end does not have the key of this endpoint")
        self._greeting.pop(connection, None)
        connection.ready = True
        connection.peer = endpoint
        self._welcome(connection)
        self._write(connection)

    def _announce(self, connection: Connection, frame: Frame, payload: memoryview | None) -> None:
        if frame.op <= connection.latest:
            raise Broken("the other end used the number of a message again")
        connection.latest = frame.op
        message = next(self._numbers)
        self._messages[message] = Message(connection, frame.op, frame.size, frame.place, payload)
        self._events.append(Incoming(message, frame.tag, frame.size))

    def _taken(self, connection: Connection, op: int) -> None:
        sending = self._sends.get(op)
        if sending is None or sending.taken or self._peers.get(sending.peer) is not connection:
            raise Broken("the other end took a message that was not offered")
        sending.taken = True
        connection.put(Kind.DATA, op=op, payload=sending.pieces, done=partial(self._sent, op))
        self._write(connection)

    def _dropped(self, connection: Connection, op: int) -> None:
        if (sending := self._sends.get(op)) is None:
            return
        if sending.taken or self._peers.get(sending.peer) is not connection:
            raise Broken("the other end dropped a message that was not offered to it")
        self._sent(op)

    def _sent(self, op: int) -> None:
        if self._sends.pop(op, None) is not None:
            self._events.append(Completed(op, ""))


def _same_peer(one: Connection, other: Connection) -> bool:
    return one is other or (bool(one.peer) and one.peer == other.peer)
