"""A rank's sending side of a port: segments go out as soon as they are computed.

On a wire that moves messages a segment is gathered into a slot and sent. On a mapped wire a notice
goes out, the blocks stay where they are, and the segment counts when the reader says it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ekiden.core.errors import EkidenError
from kv_transfer import reshard
from kv_transfer.direction import PROGRESS_S, Direction
from kv_transfer.ledger import Ledger
from kv_transfer.mapped import notice_bytes, write_notice
from kv_transfer.messages import TAKEN, Broken, OpenSend, Progress, split_tag, tag
from kv_transfer.staging import TRAILER, Message, Slice, gather, seal_message
from kv_transfer.transports.base import Incoming
from kv_transfer.wire import Wire


class _Lane:
    """What goes to one target rank, segment after segment."""

    def __init__(self, pair: reshard.Pair, peer: int) -> None:
        self.pair = pair
        self.peer = peer
        self.next = 0
        self.offered: dict[int, tuple[int, int]] = {}
        """Segments that the peer may read in our pool: their bytes, the checksum of the notice."""


class _Sending:
    def __init__(self, order: OpenSend, wire: Wire, lanes: list[_Lane], ledger: Ledger) -> None:
        self.order = order
        self.wire = wire
        self.lanes = lanes
        self.ledger = ledger
        self.segments = reshard.segments(order.start, order.end, order.segment_tokens)
        self.computed = 0
        self.blocks: Sequence[int] = ()
        self.held = True
        self.said_at = float("-inf")


class Outbound(Direction[_Sending]):
    """All the sessions that this rank sends for."""

    DOES = "sending to"

    def open(self, order: OpenSend) -> None:
        """Connect to every target rank; a rank that has nothing to send is done at once."""
        try:
            mine = [p for p in reshard.pairs(self._layout, order.layout) if p.source == self._rank]
            wire = self._wire_of(order)
            lanes = [_Lane(pair, self._connect(wire, order, pair.target)) for pair in mine]
        except EkidenError as error:
            self._emit(Broken(epoch=self._epoch, session=order.session, reason=error.message))
            return
        count = len(reshard.segments(order.start, order.end, order.segment_tokens))
        ledger = Ledger({(p.source, p.target): count for p in mine}, self._clock)
        self._begin(_Sending(order, wire, lanes, ledger))
        self._finish_if_done(order.session)

    def computed(self, session: int, end: int, blocks: Sequence[int], *, held: bool = True) -> None:
        """Positions [0, end) are in the cache at ``blocks``, and stay there until the last word
        if they are ``held``."""
        if (sending := self._sessions.get(session)) is None:
            return
        sending.computed, sending.blocks, sending.held = end, blocks, held
        self._tell(sending)

    def arrival(self, wire: Wire, message: Incoming) -> None:
        """A reader says that it has a segment. A repetition, or a late word, changes nothing."""
        wire.transport.discard(message.message)
        nonce, index = split_tag(message.tag)
        if (session := self._by_nonce.get(nonce)) is None:
            return
        sending = self._sessions[session]
        segment, target = divmod(index & ~TAKEN, len(sending.order.layout.ranks))
        for lane in sending.lanes:
            if lane.pair.target == target and (offered := lane.offered.pop(segment, None)):
                self._count(sending, lane.pair, *offered)

    def peer_lost(self, wire: Wire, peer: int, reason: str) -> None:
        for session, sending in list(self._sessions.items()):
            for lane in sending.lanes:
                if (sending.wire, lane.peer) == (wire, peer) and not (
                    sending.ledger.complete(self._rank, lane.pair.target)
                ):
                    self._break(session, lane.pair.target, reason)
                    break

    def pump(self) -> bool:
        """Send one message of the next session that can; False if none can."""
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            sending = self._sessions[self._turns[-1]]
            for lane in sending.lanes:
                if self._may_send(sending, lane):
                    if sending.wire.mapped is None:
                        self._send(sending, lane)
                    else:
                        self._announce(sending, lane)
                    return True
        return False

    def _may_send(self, sending: _Sending, lane: _Lane) -> bool:
        return (
            lane.next < len(sending.segments)
            and sending.segments[lane.next][1] <= sending.computed
            and sending.wire.may_send(lane.peer)
        )

    def _send(self, sending: _Sending, lane: _Lane) -> None:
        order, pair = sending.order, lane.pair
        start, end = sending.segments[lane.next]
        payload = pair.token_bytes(self._layout) * (end - start)
        if payload + TRAILER.size > sending.wire.slots.slot_bytes:
            self._break(order.session, pair.target, f"a message of {payload} bytes is too large")
            return
        heads, layers = pair.local(self._layout.ranks[self._rank])
        unit = reshard.unit_tokens(self._layout, order.layout)
        part = Slice(
            heads=heads,
            layers=layers,
            runs=tuple(reshard.runs(start, end, unit)),
            blocks=sending.blocks,
        )
        slot, wire_tag = sending.wire.slots.take(), self._tag(order, lane.next)
        sending.ledger.started()
        message = self._message(sending, part, slot, payload)
        checksum = seal_message(message, wire_tag ^ order.key)
        lane.next += 1
        done = partial(self._sent, order.session, pair, payload, checksum)
        sending.wire.send(order.session, lane.peer, wire_tag, slot, message.whole, done)

    def _message(self, sending: _Sending, part: Slice, slot: int, payload: int) -> Message:
        """``part`` of the cache, where it lies if the wire can take it there, else gathered."""
        straight = sending.wire.in_place is not None and sending.held
        pieces = self._in_place.pieces(part) if straight else None
        if pieces is None:
            gather(self._cache, part, sending.wire.slots.tensor(slot, payload))
        return sending.wire.slots.message(slot, payload, pieces)

    def _announce(self, sending: _Sending, lane: _Lane) -> None:
        """Tell the peer where its part of a segment is; from now on it may read there."""
        order, pair, segment = sending.order, lane.pair, lane.next
        start, end = sending.segments[segment]
        size = notice_bytes(start, end, self._layout.block_size)
        slot, wire_tag = sending.wire.slots.take(), self._tag(order, segment)
        sending.ledger.started()
        message = sending.wire.slots.message(slot, size)
        write_notice(message.payload[0], start, end, self._layout.block_size, sending.blocks)
        checksum = seal_message(message, wire_tag ^ order.key)
        lane.next += 1
        lane.offered[segment] = (pair.token_bytes(self._layout) * (end - start), checksum)
        done = partial(self._announced, order.session, pair)
        sending.wire.send(order.session, lane.peer, wire_tag, slot, message.whole, done)

    def _announced(self, session: int, pair: reshard.Pair, slot: int, error: str) -> None:
        if error:
            self._break(session, pair.target, error)

    def _tag(self, order: OpenSend, segment: int) -> int:
        return tag(order.nonce, segment * len(self._layout.ranks) + self._rank)

    def _sent(
        self, session: int, pair: reshard.Pair, payload: int, checksum: int, slot: int, error: str
    ) -> None:
        if error:
            self._break(session, pair.target, error)
            return
        self._count(self._sessions[session], pair, payload, checksum)

    def _count(self, sending: _Sending, pair: reshard.Pair, payload: int, checksum: int) -> None:
        """One more segment is through."""
        sending.ledger.add(pair.source, pair.target, payload, checksum)
        if self._clock.now() - sending.said_at >= PROGRESS_S:
            self._tell(sending)
        self._finish_if_done(sending.order.session)

    def _tell(self, sending: _Sending) -> None:
        sending.said_at = self._clock.now()
        self._emit(
            Progress(
                epoch=self._epoch,
                session=sending.order.session,
                bytes=sending.ledger.bytes,
                computed=sending.computed,
            )
        )

    def _finish_if_done(self, session: int) -> None:
        if self._sessions[session].ledger.all_complete:
            self._finish(session)
