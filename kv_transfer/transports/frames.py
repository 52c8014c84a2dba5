"""One connection of a stream wire: frames go out of a queue and come in whole. Never blocks."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum

import msgspec

HEADER = struct.Struct("<QQQQQ")
AHEAD_BYTES = 512
"""Read at once where a header is due: what of it is payload is copied once more."""
PIECES = 16
"""Buffers given to the system in one call."""


class Kind(IntEnum):
    HELLO = 1
    """Who dials, and proof that it was given the endpoint: the key in it."""
    WELCOME = 2
    EAGER = 3
    """A message with its payload behind it."""
    OFFER = 4
    """A message whose payload waits at the sender."""
    TAKE = 5
    DROP = 6
    DATA = 7
    """The payload of an offer that was taken."""


class Frame(msgspec.Struct, frozen=True):
    """``op`` is the number that the sender of a message gave it; ``size`` bytes belong to it, and
    ``place`` is where they lie at the sender, for wires that read there."""

    kind: int
    op: int
    tag: int
    size: int
    place: int


class Broken(Exception):
    """The connection is of no use any more; the text says why."""


Room = Callable[[Frame], memoryview]
"""Where the payload behind a frame goes; raises Broken if the frame cannot be."""


class Connection:
    """``peer``: the endpoint at the other end; empty for a caller who has not said who it is."""

    def __init__(self, sock: socket.socket, *, peer: bytes = b"") -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer = peer
        self.ready = False
        """The other end has shown who it is, or has taken us in."""
        self.passed_fd = -1
        """A descriptor that the end we dialled sent with its welcome; the owner closes it."""
        self.dialled = bool(peer)
        self._out: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._start = self._stop = 0
        self._frame: Frame | None = None
        self._target = self._whole = memoryview(b"")

    @property
    def waiting_to_write(self) -> bool:
        return bool(self._out)

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def close(self) -> None:
        self.sock.close()
        if self.passed_fd >= 0:
            os.close(self.passed_fd)
            self.passed_fd = -1

    def put(
        self,
        kind: Kind,
        *,
        op: int = 0,
        tag: int = 0,
        payload: memoryview | bytes = b"",
        size: int | None = None,
        place: int = 0,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame. ``done`` is called once the system has taken all of it; until then
        ``payload`` belongs to the connection. ``size``: what an offer is of."""
        length = len(payload) if size is None else size
        header = memoryview(HEADER.pack(kind, op, tag, length, place))
        self._out.append((header, None if len(payload) else done))
        if len(payload):
            self._out.append((memoryview(payload), done))

    def flush(self) -> None:
        """Write what the system takes.

        Raises:
            Broken: the connection is gone.
        """
        while self._out:
            pieces = [self._out[i][0] for i in range(min(len(self._out), PIECES))]
            try:
                taken = self.sock.sendmsg(pieces)
            except BlockingIOError:
                return
            except OSError as error:
                raise Broken(error.strerror or str(error)) from error
            self._advance(taken)

    def _advance(self, taken: int) -> None:
        while self._out and taken >= len(self._out[0][0]):
            piece, done = self._out.popleft()
            taken -= len(piece)
            if done is not None:
                done()
        if taken:
            piece, done = self._out[0]
            self._out[0] = (piece[taken:], done)

    def frames(self, room: Room, budget: int) -> Iterator[tuple[Frame, memoryview]]:
        """Frames that are whole, with their payloads; reads about ``budget`` bytes at most.

        Raises:
            Broken: the connection is gone, or what comes makes no sense.
        """
        while budget > 0:
            if self._frame is None:
                if self._stop - self._start < HEADER.size:
                    if (got := self._fill()) == 0:
                        return
                    budget -= got
                    continue
                self._frame = Frame(*HEADER.unpack_from(self._ahead, self._start))
                self._start += HEADER.size
                self._target = self._whole = room(self._frame)
            budget -= self._take_ahead()
            if len(self._target):
                if (got := self._receive(self._target)) == 0:
                    return
                self._target = self._target[got:]
                budget -= got
            if not len(self._target):
                frame, payload = self._frame, self._whole
                self._frame, self._whole = None, memoryview(b"")
                yield frame, payload

    def _take_ahead(self) -> int:
        """Payload that was read together with its header."""
        count = min(self._stop - self._start, len(self._target))
        if count:
            self._target[:count] = self._ahead[self._start : self._start + count]
            self._target = self._target[count:]
            self._start += count
        return count

    def _fill(self) -> int:
        rest = self._stop - self._start
        self._ahead[:rest] = bytes(self._ahead[self._start : self._stop])
        self._start, self._stop = 0, rest
        got = self._receive(self._ahead[rest:])
        self._stop += got
        return got

    def _receive(self, into: memoryview) -> int:
        """Bytes received; 0: none are here now."""
        try:
            got = self._receive_with_fd(into) if self._takes_fd else self.sock.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        if got == 0:
            raise Broken("the other end is gone")
        return got

    @property
    def _takes_fd(self) -> bool:
        return self.dialled and not self.ready and self.sock.family == socket.AF_UNIX

    def _receive_with_fd(self, into: memoryview) -> int:
        data, fds, flags, _ = socket.recv_fds(self.sock, len(into), 1)
        if flags & socket.MSG_CTRUNC and not fds:
            # Kept, this connection would look like one to a peer that shares nothing.
            raise Broken("the descriptor that came with it could not be taken: too many open files")
        if fds:
            self.passed_fd = fds[0]
        into[: len(data)] = data
        return len(data)
