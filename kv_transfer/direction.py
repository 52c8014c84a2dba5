"""What both directions of a port share: sessions in turns, and the one last word of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from ekiden.cache.layout import KvLayout
from ekiden.core.clock import Clock
from kv_transfer.ledger import Ledger
from kv_transfer.messages import Aborted, Broken, Finished, OpenReceive, OpenSend, PortEvent
from kv_transfer.wire import Wire

Emit = Callable[[PortEvent], None]


class Session(Protocol):
    """What is known of one hand-off on one rank."""

    ledger: Ledger

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
        wire: Wire,
        clock: Clock,
        emit: Emit,
    ) -> None:
        self._cache = cache_BHL2SD
        self._layout = layout
        self._rank = rank
        self._epoch = epoch
        self._wire = wire
        self._clock = clock
        self._emit = emit
        self._sessions: dict[int, S] = {}
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
        ledger = self._sessions[session].ledger
        self._forget(session)
        self._emit(
            Finished(
                epoch=self._epoch,
                session=session,
                pairs=ledger.tallies(),
                seconds=ledger.seconds,
                wire=self._wire.transport.wire,
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
        if self._sessions.pop(session, None) is None:
            return False
        self._turns.remove(session)
        self._wire.abandon(session)
        return True
