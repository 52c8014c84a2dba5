"""The sessions of one replica, as its service sees them. No torch, no asyncio, no thread.

All methods of an object are called from one thread. Nothing blocks: commands go to the ports
through ``send_port(message, rank)``, the ports' answers come in by ``on_port``, and ``poll``
hands out what happened. Call ``tick`` when ``next_deadline`` has passed.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from ekiden.core.clock import Clock
from ekiden.core.errors import InvariantBroken, Overloaded, ReplicaFailed
from kv_transfer import reshard
from kv_transfer.description import MAPPED_WIRES, WIRE_VERSION, ReplicaDescription
from kv_transfer.messages import (
    NONCE_BITS,
    TAKEN,
    Abort,
    BlockRead,
    OpenReceive,
    OpenSend,
    PortEvent,
    Seal,
    SessionOffer,
    TransferLimits,
    decode_event,
    decode_from_peer,
    encode,
)
from kv_transfer.session import (
    Arrived,
    Drained,
    Failed,
    ReceiveSession,
    SealedOut,
    SendSession,
    SessionEvent,
    Terms,
)

__all__ = [
    "Arrived",
    "Drained",
    "Failed",
    "ReceiveSessions",
    "SealedOut",
    "SendSessions",
    "Sessions",
]

PIECE_BYTES = 32 << 20
"""Of a segment that is read out of a mapped pool: no slot has to hold it."""

SendPort = Callable[[bytes, int | None], None]
S = TypeVar("S", ReceiveSession, SendSession)


class _Sessions(Generic[S]):
    """The table of open sessions and everything that does not depend on the side."""

    def __init__(
        self, me: ReplicaDescription, send_port: SendPort, clock: Clock, limits: TransferLimits
    ) -> None:
        self._me = me
        self._send_port = send_port
        self._clock = clock
        self._limits = limits
        self._open: dict[int, S] = {}
        self._events: list[SessionEvent] = []
        self.dropped = 0
        """Messages of another epoch or of a session that is not open."""

    @property
    def open_count(self) -> int:
        """Sessions whose Drained has not come yet, stuck ones included."""
        return len(self._open)

    def states(self) -> list[str]:
        """The state of every open session, as ``session.State`` names it, in lower case."""
        return [session.state.name.lower() for session in self._open.values()]

    def stuck(self) -> list[str]:
        """One sentence for each session whose blocks are in quarantine for good."""
        return [text for s in self._open.values() if (text := s.stuck()) is not None]

    def on_port(self, rank: int, message: bytes) -> None:
        """What a rank's port emitted."""
        event = decode_event(message)
        if isinstance(event, BlockRead):
            self.dropped += 1
        else:
            self.hear(rank, event)

    def hear(self, rank: int, event: PortEvent) -> None:
        """The same, decoded."""
        session = self._open.get(event.session)
        if session is None or event.epoch != self._me.epoch:
            self.dropped += 1
            return
        session.on_rank(rank, event, self._clock.now())
        self._settle(session)

    def fail(self, session: int, reason: str) -> None:
        """Cancel, or the peer is gone. Does nothing for a session that has ended or failed."""
        if (found := self._open.get(session)) is not None:
            found.fail(reason, self._clock.now())
            self._settle(found)

    def tick(self) -> None:
        """Act on every deadline that has passed."""
        now = self._clock.now()
        for session in list(self._open.values()):
            session.tick(now)
            self._settle(session)

    def next_deadline(self) -> float | None:
        """On the clock that was passed in; None if nothing is waited for."""
        return min(
            (s.deadline for s in self._open.values() if s.deadline is not None), default=None
        )

    def _take(self) -> list[SessionEvent]:
        events, self._events = self._events, []
        return events

    def _check_room(self) -> None:
        if len(self._open) >= self._limits.max_sessions:
            raise Overloaded(
                f"{self._me.replica_id} has {len(self._open)} hand-off sessions open, its limit"
            )

    def _add(self, session: S, commands: Iterable[tuple[int, msgspec.Struct]]) -> None:
        self._open[session.session] = session
        for rank, command in commands:
            self._send_port(encode(command), rank)
        self._settle(session)

    def _settle(self, session: S) -> None:
        for rank in session.aborts:
            self._send_port(encode(Abort(session=session.session)), rank)
        session.aborts.clear()
        self._events += session.events
        if any(isinstance(event, Drained) for event in session.events):
            del self._open[session.session]
        session.events.clear()


class ReceiveSessions(_Sessions[ReceiveSession]):
    """Decode's side."""

    def __init__(
        self, me: ReplicaDescription, send_port: SendPort, clock: Clock, limits: TransferLimits
    ) -> None:
        super().__init__(me, send_port, clock, limits)
        self._ids = itertools.count(1, 2)  # odd, so that no number means a send session too
        self._nonces: dict[int, int] = {}

    def open(
        self,
        request_id: str,
        peer: ReplicaDescription,
        start: int,
        end: int,
        blocks: Sequence[int],
        wire: str,
    ) -> tuple[int, bytes]:
        """Make the ports ready for positions [start, end) into ``blocks`` (table from position 0),
        over ``wire``, which both replicas have.

        Returns (session, offer for ``Reserved.offer``). ``start == end``: nothing to move; the
        session still ends with the seal.

        Raises:
            Overloaded: ``limits.max_sessions`` are open.
            InvariantBroken: the blocks do not cover the positions.
        """
        self._check_room()
        _check_range(request_id, start, end, len(blocks) * self._me.kv.block_size)
        offer = self._draw_offer(peer, start, end, wire)
        ranks = tuple(range(len(self._me.kv.ranks))) if start < end else ()
        terms = Terms(
            session=offer.session,
            peer=peer.replica_id,
            ranks=ranks,
            expected_bytes=_total_bytes(peer, self._me, end - start),
            limits=self._limits,
        )
        command = _open_receive(offer, peer, blocks)
        self._nonces[offer.session] = offer.nonce
        self._add(ReceiveSession(terms, self._clock.now()), ((r, command) for r in ranks))
        return offer.session, encode(offer)

    def sealed(self, session: int, seal: bytes) -> None:
        """Prefill's ``Sealed.seal``; one that cannot be read or is of another life fails it."""
        found = self._open.get(session)
        if found is None:
            self.dropped += 1
            return
        try:
            self._seal(found, seal)
        except ReplicaFailed as error:
            found.fail(error.message, self._clock.now())
        self._settle(found)

    def poll(self) -> list[Arrived | Failed | Drained]:
        """What happened since the last call, in order; each session ends with one Drained."""
        events = [e for e in self._take() if not isinstance(e, SealedOut)]
        for event in events:
            if isinstance(event, Drained):
                self._nonces.pop(event.session, None)
        return events

    def _seal(self, session: ReceiveSession, data: bytes) -> None:
        seal = decode_from_peer(data, Seal, session.peer)
        if (seal.nonce, seal.decode_epoch) != (self._nonces[session.session], self._me.epoch):
            raise ReplicaFailed(f"{session.peer} sent the seal of another session")
        session.seal(seal.pairs, self._clock.now())

    def _draw_offer(
        self, peer: ReplicaDescription, start: int, end: int, wire: str
    ) -> SessionOffer:
        size = reshard.segment_tokens(
            peer.kv,
            self._me.kv,
            wanted=self._limits.segment_tokens,
            granule=self._me.granule,
            message_bytes=PIECE_BYTES if wire in MAPPED_WIRES else reshard.MESSAGE_BYTES,
        )
        most_ranks = max(len(peer.kv.ranks), len(self._me.kv.ranks))
        if (end // size + 1) * most_ranks > TAKEN:
            raise InvariantBroken(f"{end} positions in segments of {size} do not fit a tag")
        return SessionOffer(
            wire_version=WIRE_VERSION,
            wire=wire,
            session=next(self._ids),
            nonce=secrets.randbits(NONCE_BITS),
            key=secrets.randbits(64),
            decode_epoch=self._me.epoch,
            prefill_epoch=peer.epoch,
            start=start,
            end=end,
            segment_tokens=size,
        )


class SendSessions(_Sessions[SendSession]):
    """Prefill's side. The numbers ``open`` returns are what ``Chunk.session`` carries."""

    def __init__(
        self, me: ReplicaDescription, send_port: SendPort, clock: Clock, limits: TransferLimits
    ) -> None:
        super().__init__(me, send_port, clock, limits)
        self._ids = itertools.count(2, 2)

    def open(self, offer: bytes, peer: ReplicaDescription) -> int:
        """Make the ports ready to send what ``offer`` asks for to decode replica ``peer``.

        Call it before the first chunk with this session is put into a step.

        Raises:
            ReplicaFailed: the offer cannot be read, or is of another life of either replica.
            Overloaded: ``limits.max_sessions`` are open.
        """
        self._check_room()
        asked = decode_from_peer(offer, SessionOffer, peer.replica_id)
        self._check_offer(asked, peer)
        session = next(self._ids)
        ranks = tuple(range(len(self._me.kv.ranks))) if asked.start < asked.end else ()
        terms = Terms(
            session=session,
            peer=peer.replica_id,
            ranks=ranks,
            expected_bytes=_total_bytes(self._me, peer, asked.end - asked.start),
            limits=self._limits,
        )
        command = _open_send(session, asked, peer)
        self._add(SendSession(terms, asked, self._clock.now()), ((r, command) for r in ranks))
        return session

    def asked_tokens(self, session: int) -> int:
        """Where the positions that an open session asks for end; 0 if it is not open."""
        found = self._open.get(session)
        return found.offer.end if found is not None else 0

    def poll(self) -> list[SealedOut | Failed | Drained]:
        """What happened since the last call, in order; each session ends with one Drained."""
        return [e for e in self._take() if not isinstance(e, Arrived)]

    def _check_offer(self, offer: SessionOffer, peer: ReplicaDescription) -> None:
        checks = (
            ("wire version", offer.wire_version, WIRE_VERSION),
            ("prefill epoch", offer.prefill_epoch, self._me.epoch),
            ("decode epoch", offer.decode_epoch, peer.epoch),
        )
        for name, said, known in checks:
            if said != known:
                raise ReplicaFailed(
                    f"{peer.replica_id} offers a hand-off for {name} {said}, but it is {known}: "
                    "one of the two has restarted; meet again"
                )
        if offer.wire not in self._me.wires:
            raise ReplicaFailed(
                f"{peer.replica_id} asks for KV over {offer.wire}, and {self._me.replica_id} has "
                f"only {', '.join(self._me.wires)}: meet again"
            )
        bad_size = offer.segment_tokens < 1 or offer.segment_tokens % self._me.granule
        bad_nonce = not (0 <= offer.nonce < 1 << NONCE_BITS and 0 <= offer.key < 1 << 64)
        if not 0 <= offer.start <= offer.end <= self._me.max_model_len or bad_size or bad_nonce:
            raise ReplicaFailed(
                f"{peer.replica_id} asks for positions [{offer.start}, {offer.end}) in segments "
                f"of {offer.segment_tokens} under nonce {offer.nonce}, outside of what "
                f"{self._me.replica_id} can send"
            )


class Sessions:
    """All hand-offs of one replica. Prefill sends, but for prefixes that it fetches; decode the
    other way about. The numbers of sessions tell the direction: those that receive are odd."""

    def __init__(
        self, me: ReplicaDescription, send_port: SendPort, clock: Clock, limits: TransferLimits
    ) -> None:
        self.receiving = ReceiveSessions(me, send_port, clock, limits)
        self.sending = SendSessions(me, send_port, clock, limits)

    @property
    def open_count(self) -> int:
        return self.receiving.open_count + self.sending.open_count

    def states(self) -> list[str]:
        return self.receiving.states() + self.sending.states()

    def stuck(self) -> list[str]:
        return self.receiving.stuck() + self.sending.stuck()

    def on_port(self, rank: int, message: bytes) -> None:
        event = decode_event(message)
        if isinstance(event, BlockRead):
            self.receiving.dropped += 1
        elif event.session % 2:
            self.receiving.hear(rank, event)
        else:
            self.sending.hear(rank, event)

    def fail(self, session: int, reason: str) -> None:
        self.receiving.fail(session, reason)
        self.sending.fail(session, reason)

    def tick(self) -> None:
        self.receiving.tick()
        self.sending.tick()

    def next_deadline(self) -> float | None:
        both = (self.receiving.next_deadline(), self.sending.next_deadline())
        return min((deadline for deadline in both if deadline is not None), default=None)

    def poll(self) -> list[SessionEvent]:
        return [*self.receiving.poll(), *self.sending.poll()]


def _check_range(request_id: str, start: int, end: int, capacity: int) -> None:
    if not 0 <= start <= end <= capacity:
        raise InvariantBroken(
            f"{request_id}: positions [{start}, {end}) do not fit blocks of {capacity} positions"
        )


def _total_bytes(source: ReplicaDescription, target: ReplicaDescription, tokens: int) -> int:
    shares = reshard.pairs(source.kv, target.kv)
    return tokens * sum(pair.token_bytes(source.kv) for pair in shares)


def _open_receive(
    offer: SessionOffer, peer: ReplicaDescription, blocks: Sequence[int]
) -> OpenReceive:
    return OpenReceive(
        session=offer.session,
        nonce=offer.nonce,
        key=offer.key,
        wire=offer.wire,
        start=offer.start,
        end=offer.end,
        segment_tokens=offer.segment_tokens,
        peer=peer.replica_id,
        layout=peer.kv,
        endpoints=peer.endpoints,
        blocks=tuple(blocks),
    )


def _open_send(session: int, offer: SessionOffer, peer: ReplicaDescription) -> OpenSend:
    return OpenSend(
        session=session,
        nonce=offer.nonce,
        key=offer.key,
        wire=offer.wire,
        start=offer.start,
        end=offer.end,
        segment_tokens=offer.segment_tokens,
        peer=peer.replica_id,
        layout=peer.kv,
        endpoints=peer.endpoints,
    )
