"""What both directions of a port share: sessions in turns, and the one last word of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from ekiden.cache.layout import KvLayout
from ekiden.core.clock import Clock
from ekiden.core.errors import ReplicaFailed
from kv_transfer.in_place import InPlace
from kv_transfer.ledger import Ledger
from kv_transfer.messages import (
    Aborted,
    Broken,
    Finished,
    OpenReceive,
    OpenSend,
    PortEvent,
    endpoint_on,
)
from kv_transfer.wire import Wire

PROGRESS_S = 0.2
"""Between two signs of progress of one session, at least."""

Emit = Callable[[PortEvent], None]


class Session(Protocol):
    """What is known of one hand-off on one rank."""

    ledger: Ledger
    wire: Wire

    @property
    def order(self) -> OpenReceive | OpenSend: ...


S = TypeVar("S", bound=Session)


class Direction(Generic[S]):
    """All the sessions that this rank has in one direction."""

    DOES: ClassVar[str]
    """For a sentence: ``DOES`` rank 2 of p-1."""

    def __init__(
        self,
        cache_BHL2SD: torch.Tensor,
        layout: KvLayout,
        rank: int,
        epoch: int,
        wires: Mapping[str, Wire],
        clock: Clock,
        emit: Emit,
    ) -> None:
        self._cache = cache_BHL2SD
        self._in_place = InPlace(cache_BHL2SD)
        self._layout = layout
        self._rank = rank
        self._epoch = epoch
        self._wires = wires
        self._clock = clock
        self._emit = emit
        self._sessions: dict[int, S] = {}
        self._by_nonce: dict[int, int] = {}
        self._turns: deque[int] = deque()

    def abort(self, session: int) -> bool:
        """Give a session up; False if it is not open here."""
        if not self._forget(session):
            return False
        self._emit(Aborted(epoch=self._epoch, session=session))
        return True

    def end_all(self, reason: str) -> None:
        """The last word of every session; ``reason``: empty if they are merely given up."""
        for session in list(self._sessions):
            if reason:
                self._forget(session)
                self._emit(Broken(epoch=self._epoch, session=session, reason=reason))
            else:
                self.abort(session)

    def _finish(self, session: int) -> None:
        ledger, wire = self._sessions[session].ledger, self._sessions[session].wire
        self._forget(session)
        self._emit(
            Finished(
                epoch=self._epoch,
                session=session,
                pairs=ledger.tallies(),
                seconds=ledger.seconds,
                wire=wire.transport.wire,
            )
        )

    def _break(self, session: int, rank: int, reason: str) -> None:
        peer = self._sessions[session].order.peer
        self._forget(session)
        self._emit(
            Broken(
                epoch=self._epoch,
                session=session,
                reason=f"{self.DOES} rank {rank} of {peer}: {reason}",
            )
        )

    def _forget(self, session: int) -> bool:
        """The session is no more; False if it was not."""
        if (gone := self._sessions.pop(session, None)) is None:
            return False
        del self._by_nonce[gone.order.nonce]
        self._turns.remove(session)
        gone.wire.abandon(session)
        return True

    def _begin(self, session: S) -> None:
        number = session.order.session
        self._sessions[number] = session
        self._by_nonce[session.order.nonce] = number
        self._turns.append(number)

    def _wire_of(self, order: OpenReceive | OpenSend) -> Wire:
        """The wire that a session is to use.

        Raises:
            ReplicaFailed: this rank does not have it.
        """
        if (wire := self._wires.get(order.wire)) is None:
            known = ", ".join(self._wires)
            raise ReplicaFailed(f"this rank has no {order.wire} wire, only {known}")
        return wire

    def _connect(self, wire: Wire, order: OpenReceive | OpenSend, rank: int) -> int:
        """The number of the peer's ``rank`` on ``wire``. Raises ReplicaFailed."""
        return wire.transport.connect(endpoint_on(order.wire, order.endpoints[rank], order.peer))
