"""The interface of a wire. Everything is called from one thread.

Messages are two-sided: nothing is written into a process but what that process accepted into a
buffer of its choice. An arriving message is announced first (``Incoming``); the owner of the
transport then either receives it or discards it. So no receive is ever pending for a message that
may not come, and a buffer belongs to the wire only between ``receive`` (or ``send``) and its
``Completed``, whatever else is cancelled or fails meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Incoming(msgspec.Struct, frozen=True):
    """A message is at the door; ``message`` names it for ``receive`` or ``discard``."""

    message: int
    tag: int
    bytes: int


class Completed(msgspec.Struct, frozen=True):
    """A send or a receive ended and the wire has let go of its buffer. ``error``: empty if good.

    A completed send was taken over by the wire; it need not have arrived.
    """

    op: int
    error: str


class PeerLost(msgspec.Struct, frozen=True):
    """The connection is gone, by whichever side; its operations complete with errors.

    A number is never used again: the next ``connect`` to the same endpoint draws a new one.
    """

    peer: int
    reason: str


Event = Incoming | Completed | PeerLost

Pieces = Sequence[memoryview]
"""Bytes that belong together, in order, wherever they lie."""


class Transport(Protocol):
    """One rank's end of a wire."""

    @property
    def wire(self) -> str:
        """What is really used, such as ``ucx/tcp``."""

    @property
    def in_place(self) -> bool:
        """It is an ``InPlaceTransport``. Any other takes one piece, of the registered arena."""

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when ``poll`` has something to do."""

    def register(self, arena: memoryview) -> None:
        """Make ``arena`` (writable bytes) known.

        Raises:
            SetupError: the memory cannot be used; the rank must not become ready.
        """

    def describe(self) -> bytes:
        """This end's address, for ``connect`` elsewhere."""

    def connect(self, endpoint: bytes) -> int:
        """The number of the peer at ``endpoint``: the same one until it is lost.

        Raises:
            ReplicaFailed: the endpoint's bytes are not an address of this wire.
        """

    def send(self, peer: int, tag: int, pieces: Pieces) -> int:
        """Start to send; returns the op that ``Completed`` will name. A lost peer: it fails."""

    def receive(self, message: int, pieces: Pieces) -> int:
        """Start to receive an announced message into ``pieces`` of exactly its size."""

    def discard(self, message: int) -> None:
        """Throw an announced message away."""

    def poll(self) -> list[Event]:
        """Do what can be done now, and say what happened. Never waits."""

    def idle(self) -> float:
        """Call before sleeping on ``fds``: the seconds until ``poll`` is due whatever they say.
        0: there is something to do now; infinity: nothing but they."""

    def disconnect(self, peer: int) -> None:
        """Break the connection: ``PeerLost`` and the errors of its operations come in later
        polls, on both ends. Nothing happens if it is broken already."""

    def close(self) -> None:
        """Break every connection and let go of all buffers. The last call."""


class InPlaceTransport(Transport, Protocol):
    """A wire that takes pieces of any memory, as many as you like, and can let go of them."""

    def move(self, op: int, buffer: memoryview) -> None:
        """Let go of the pieces of ``op`` now, and go on with ``buffer``, which has room for all of
        them. What a send has not sent is copied there; what a receive still gets comes there. An
        op that is over already stays as it is."""


class MappedTransport(Transport, Protocol):
    """A wire whose ends may read each other's pool: messages announce, and no payload is sent.

    Reading is all that a peer can do. What was read counts only if the peer still held it then,
    and only the peer knows: it says so in its seal.
    """

    def share(self, pool_fd: int | None) -> None:
        """Let connected peers map the pool behind ``pool_fd``; None: it cannot be mapped."""

    def pool(self, peer: int) -> memoryview | None:
        """The peer's pool, read-only bytes, valid while the caller holds it; None: not mapped yet.

        Raises:
            ReplicaFailed: it will not be: the peer does not share it.
        """
