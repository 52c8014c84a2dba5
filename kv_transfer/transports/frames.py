"""One connection of a stream wire: frames go out of a queue and come in whole. Never blocks."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum

import msgspec

from kv_transfer.transports.base import Pieces
from kv_transfer.transports.pieces import size_of

HEADER = struct.Struct("<QQQQQ")
AHEAD_BYTES = 512
"""Read at once where a header is due: what of it is payload is copied once more."""
PIECES = 64
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


Room = Callable[[Frame], Pieces]
"""Where the payload behind a frame goes; raises Broken if the frame cannot be."""


class _Outgoing(msgspec.Struct):
    """Bytes to be written. ``op``: the send whose payload they are, 0 for a header."""

    piece: memoryview
    op: int
    done: Callable[[], None] | None


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
        self.latest = 0
        """The number of the message that came last: those of the other end only rise."""
        self.dialled = bool(peer)
        self._out: deque[_Outgoing] = deque()
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._start = self._stop = 0
        self._frame: Frame | None = None
        self._whole: Pieces = ()
        self._targets: deque[memoryview] = deque()

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
        payload: Pieces = (),
        size: int | None = None,
        place: int = 0,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame. ``done`` is called once the system has taken all of it; until then
        ``payload`` belongs to the connection. ``size``: what an offer is of."""
        pieces = [piece for piece in payload if len(piece)]
        length = size_of(pieces) if size is None else size
        header = memoryview(HEADER.pack(kind, op, tag, length, place))
        self._out.append(_Outgoing(header, 0, None))
        self._out.extend(_Outgoing(piece, op, None) for piece in pieces)
        self._out[-1].done = done

    def move_out(self, op: int, buffer: memoryview) -> None:
        """Copy what has not gone of a payload to ``buffer``, and send it from there."""
        for outgoing in self._out:
            if outgoing.op == op:
                size = len(outgoing.piece)
                buffer[:size] = outgoing.piece
                outgoing.piece, buffer = buffer[:size], buffer[size:]

    def move_in(self, pieces: Pieces, buffer: memoryview) -> None:
        """What still comes of the payload that was to go to ``pieces`` goes to ``buffer``."""
        if self._whole is pieces:
            self._targets = deque([buffer[: size_of(self._targets)]])

    def flush(self) -> None:
        """Write what the system takes.

        Raises:
            Broken: the connection is gone.
        """
        while self._out:
            pieces = [outgoing.piece for outgoing in itertools.islice(self._out, PIECES)]
            try:
                taken = self.sock.sendmsg(pieces)
            except BlockingIOError:
                return
            except OSError as error:
                raise Broken(error.strerror or str(error)) from error
            self._advance(taken)

    def _advance(self, taken: int) -> None:
        while self._out and taken >= len(self._out[0].piece):
            outgoing = self._out.popleft()
            taken -= len(outgoing.piece)
            if outgoing.done is not None:
                outgoing.done()
        if taken:
            self._out[0].piece = self._out[0].piece[taken:]

    def frames(self, room: Room, budget: int) -> Iterator[tuple[Frame, Pieces]]:
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
                self._whole = room(self._frame)
                self._targets = deque(piece for piece in self._whole if len(piece))
            budget -= self._take_ahead()
            if self._targets:
                if (got := self._receive(list(itertools.islice(self._targets, PIECES)))) == 0:
                    return
                self._came(got)
                budget -= got
            if not self._targets:
                frame, payload = self._frame, self._whole
                self._frame, self._whole = None, ()
                yield frame, payload

    def _take_ahead(self) -> int:
        """Payload that was read together with its header."""
        begun = self._start
        while self._targets and self._start < self._stop:
            target = self._targets[0]
            count = min(self._stop - self._start, len(target))
            target[:count] = self._ahead[self._start : self._start + count]
            self._start += count
            self._came(count)
        return self._start - begun

    def _came(self, count: int) -> None:
        """``count`` more bytes of the payload are where they belong."""
        while self._targets and count >= len(self._targets[0]):
            count -= len(self._targets.popleft())
        if count:
            self._targets[0] = self._targets[0][count:]

    def _fill(self) -> int:
        rest = self._stop - self._start
        self._ahead[:rest] = bytes(self._ahead[self._start : self._stop])
        self._start, self._stop = 0, rest
        got = self._receive([self._ahead[rest:]])
        self._stop += got
        return got

    def _receive(self, into: list[memoryview]) -> int:
        """Bytes received; 0: none are here now."""
        try:
            if self._takes_fd:
                got = self._receive_with_fd(into[0])
            else:
                got = self.sock.recvmsg_into(into)[0]
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
