"""What every request of a decode replica shares, and the switchboard of its events.

All of it runs on the service's event loop. Engine outputs and session events come in here and go
to the request they belong to; one flush per engine step sends a gateway one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ekiden.core.errors import EkidenError
from ekiden.engine.engine import EngineOutput, Reservation
from ekiden.service.core import ReplicaCore
from ekiden.service.replica import Replica
from kv_transfer.description import ReplicaDescription
from kv_transfer.session import Arrived, Drained, Failed, SealedOut, SessionEvent

from .peers import PrefillPeers
from .wires import WireChooser

if TYPE_CHECKING:
    from .life import Life


class Receiver(Protocol):
    """Who a receiving session is for."""

    def on_arrived(self, event: Arrived) -> None: ...

    def on_failed(self, event: Failed) -> None: ...


class Lender(Protocol):
    """Who a sending session is for: a prefix that prefill fetches from here."""

    def on_sealed(self, event: SealedOut) -> None: ...

    def on_failed(self, event: Failed) -> None: ...


class DecodeCore(ReplicaCore):
    """The engine, the sessions and the peers of one decode replica, and who waits for what."""

    def __init__(self, replica: Replica, on_fatal: Callable[[BaseException], None]) -> None:
        self.lives: dict[str, Life] = {}
        self.freed = asyncio.Event()
        self._receivers: dict[int, Receiver] = {}
        self._lenders: dict[int, Lender] = {}
        self._reservations: dict[int, int] = {}
        """By session: the key of the blocks that it writes into or reads."""
        super().__init__(replica, on_fatal)
        self.peers = PrefillPeers(self.me, replica.config.secret, WireChooser(self).choose)
        replica.wires = self.peers.wires

    def _on_output(self, output: EngineOutput) -> None:
        """Hand each part of a step's output to its request, then send what each caller got."""
        touched = set()
        for event in output.events:
            if life := self.lives.get(event.request_id):
                life.on_event(event)
        for delta in output.deltas:
            if life := self.lives.get(delta.request_id):
                life.on_delta(delta)
                touched.add(life.sink)
        for finished in output.finished:
            if life := self.lives.get(finished.request_id):
                life.on_finished(finished)
                touched.add(life.sink)
        for sink in touched:
            sink.flush()
        if output.room:
            self._notify_freed()

    def _tell_all(self, error: EkidenError) -> None:
        for life in list(self.lives.values()):
            life.on_fatal(error)

    def states(self) -> list[str]:
        return [*super().states(), *(life.state for life in self.lives.values())]

    def open_session(
        self,
        receiver: Receiver,
        request_id: str,
        peer: ReplicaDescription,
        start: int,
        end: int,
        reservation: Reservation,
        wire: str,
    ) -> tuple[int, bytes]:
        """Open the session that fills reserved blocks; returns its number and the offer. The blocks
        are let go once nobody writes into them any more.

        Raises:
            EkidenError: it cannot be opened; the blocks are still the caller's to let go.
        """
        session, offer = self.sessions.receiving.open(
            request_id, peer, start, end, reservation.blocks, wire
        )
        self._receivers[session] = receiver
        self._reservations[session] = reservation.key
        self.pump.pump()
        return session, offer

    def _on_session(self, event: SessionEvent) -> None:
        receiver = self._receivers.get(event.session)
        lender = self._lenders.get(event.session)
        if isinstance(event, Drained):
            self._receivers.pop(event.session, None)
            self._lenders.pop(event.session, None)
            key = self._reservations.pop(event.session)
            self.let_go(key)
        elif receiver is not None and isinstance(event, Arrived):
            receiver.on_arrived(event)
        elif receiver is not None and isinstance(event, Failed):
            receiver.on_failed(event)
        elif lender is not None and isinstance(event, SealedOut):
            lender.on_sealed(event)
        elif lender is not None and isinstance(event, Failed):
            lender.on_failed(event)

    def open_lending(
        self, lender: Lender, offer: bytes, peer: ReplicaDescription, reservation: Reservation
    ) -> int:
        """Send what ``offer`` asks for out of blocks that are held; they are let go once nobody
        reads them any more. Returns the session.

        Raises:
            EkidenError: the offer cannot be served; the blocks are still the caller's to let go.
        """
        session = self.sessions.sending.open(offer, peer)
        self._lenders[session] = lender
        self._reservations[session] = reservation.key
        if self.sessions.sending.asked_tokens(session) > reservation.held_tokens:
            self.fail_session(session, "decode does not hold so much of the prefix")
        else:
            self.say_computed(session, reservation.blocks, held=True)
            self.pump.pump()
        return session

    def let_go(self, key: int) -> None:
        """Nobody writes into the blocks of reservation ``key`` any more."""
        self.bridge.post(lambda engine: engine.writer_done(key))

    def seal_session(self, session: int, seal: bytes) -> None:
        self.sessions.receiving.sealed(session, seal)
        self.pump.pump()

    def _notify_freed(self) -> None:
        """There may be room now: whoever waits on ``freed`` looks again."""
        self.freed.set()
        self.freed = asyncio.Event()

    async def close(self) -> None:
        await self.peers.close()
        await super().close()
