"""A prefill rank's side of a port: segments go out as soon as they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ekiden.core.errors import EkidenError
from kv_transfer import reshard
from kv_transfer.direction import Direction
from kv_transfer.ledger import Ledger
from kv_transfer.messages import Broken, OpenSend, Progress, tag
from kv_transfer.staging import TRAILER, Slice, gather, seal_message


class _Lane:
    """What goes to one target rank, segment after segment."""

    def __init__(self, pair: reshard.Pair, peer: int) -> None:
        self.pair = pair
        self.peer = peer
        self.next = 0


class _Sending:
    def __init__(self, order: OpenSend, lanes: list[_Lane], ledger: Ledger) -> None:
        self.order = order
        self.lanes = lanes
        self.ledger = ledger
        self.segments = reshard.segments(order.start, order.end, order.segment_tokens)
        self.computed = 0
        self.blocks: Sequence[int] = ()


class Outbound(Direction[_Sending]):
    """All the sessions that this rank sends for."""

    DOES = "sending to"

    def open(self, order: OpenSend) -> None:
        """Connect to every target rank; a rank that has nothing to send is done at once."""
        try:
            mine = [p for p in reshard.pairs(self._layout, order.layout) if p.source == self._rank]
            connect = self._wire.transport.connect
            lanes = [_Lane(pair, connect(order.endpoints[pair.target])) for pair in mine]
        except EkidenError as error:
            self._emit(Broken(epoch=self._epoch, session=order.session, reason=error.message))
            return
        count = len(reshard.segments(order.start, order.end, order.segment_tokens))
        ledger = Ledger({(p.source, p.target): count for p in mine}, self._clock)
        self._sessions[order.session] = _Sending(order, lanes, ledger)
        self._turns.append(order.session)
        self._finish_if_done(order.session)

    def computed(self, session: int, end: int, blocks: Sequence[int]) -> None:
        """Positions [0, end) are in the cache at ``blocks``, and stay there until the last word."""
        if (sending := self._sessions.get(session)) is None:
            return
        sending.computed, sending.blocks = end, blocks
        self._emit(
            Progress(epoch=self._epoch, session=session, bytes=sending.ledger.bytes, computed=end)
        )

    def peer_lost(self, peer: int, reason: str) -> None:
        for session, sending in list(self._sessions.items()):
            for lane in sending.lanes:
                if lane.peer == peer and not sending.ledger.complete(self._rank, lane.pair.target):
                    self._break(session, lane.pair.target, reason)
                    break

    def pump(self) -> bool:
        """Send one message of the next session that can; False if none can."""
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            sending = self._sessions[self._turns[-1]]
            for lane in sending.lanes:
                if self._may_send(sending, lane):
                    self._send(sending, lane)
                    return True
        return False

    def _may_send(self, sending: _Sending, lane: _Lane) -> bool:
        return (
            lane.next < len(sending.segments)
            and sending.segments[lane.next][1] <= sending.computed
            and self._wire.room(lane.peer)
        )

    def _send(self, sending: _Sending, lane: _Lane) -> None:
        order, pair = sending.order, lane.pair
        start, end = sending.segments[lane.next]
        payload = pair.token_bytes(self._layout) * (end - start)
        if payload + TRAILER.size > self._wire.slots.slot_bytes:
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
        slot, wire_tag = self._wire.slots.take(), self._tag(order, lane.next)
        sending.ledger.started()
        gather(self._cache, part, self._wire.slots.tensor(slot, payload))
        size = payload + TRAILER.size
        checksum = seal_message(self._wire.slots.bytes(slot, size), wire_tag)
        lane.next += 1
        done = partial(self._sent, order.session, pair, payload, checksum)
        self._wire.send(order.session, lane.peer, wire_tag, slot, size, done)

    def _tag(self, order: OpenSend, segment: int) -> int:
        return tag(order.nonce, segment * len(self._layout.ranks) + self._rank)

    def _sent(
        self, session: int, pair: reshard.Pair, payload: int, checksum: int, slot: int, error: str
    ) -> None:
        if error:
            self._break(session, pair.target, error)
            return
        self._sessions[session].ledger.add(pair.source, pair.target, payload, checksum)
        self._finish_if_done(session)

    def _finish_if_done(self, session: int) -> None:
        if self._sessions[session].ledger.all_complete:
            self._finish(session)
