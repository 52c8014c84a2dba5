"""The sessions that a replica sends: prefill's hand-offs, and prefixes that decode lends."""

from __future__ import annotations

import itertools

from ekiden.core.clock import Clock
from ekiden.core.errors import ReplicaFailed
from kv_transfer.description import WIRE_VERSION, ReplicaDescription
from kv_transfer.messages import (
    NONCE_BITS,
    OpenSend,
    SessionOffer,
    TransferLimits,
    decode_from_peer,
)
from kv_transfer.session import Arrived, Drained, Failed, SealedOut, SendSession, Terms
from kv_transfer.session_table import SendPort, SessionTable, total_bytes


class SendSessions(SessionTable[SendSession]):
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
            expected_bytes=total_bytes(self._me, peer, asked.end - asked.start),
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
