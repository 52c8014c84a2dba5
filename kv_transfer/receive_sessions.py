"""The sessions that a replica receives: decode's hand-offs, and prefixes that prefill fetches."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

from ekiden.core.clock import Clock
from ekiden.core.errors import InvariantBroken, ReplicaFailed
from kv_transfer import reshard
from kv_transfer.description import MAPPED_WIRES, WIRE_VERSION, ReplicaDescription
from kv_transfer.messages import (
    NONCE_BITS,
    TAKEN,
    OpenReceive,
    Seal,
    SessionOffer,
    TransferLimits,
    decode_from_peer,
    encode,
)
from kv_transfer.session import Arrived, Drained, Failed, ReceiveSession, SealedOut, Terms
from kv_transfer.session_table import SendPort, SessionTable, total_bytes

PIECE_BYTES = 32 << 20
"""Of a segment that is read out of a mapped pool: no slot has to hold it."""


class ReceiveSessions(SessionTable[ReceiveSession]):
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
            expected_bytes=total_bytes(peer, self._me, end - start),
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


def _check_range(request_id: str, start: int, end: int, capacity: int) -> None:
    if not 0 <= start <= end <= capacity:
        raise InvariantBroken(
            f"{request_id}: positions [{start}, {end}) do not fit blocks of {capacity} positions"
        )


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
