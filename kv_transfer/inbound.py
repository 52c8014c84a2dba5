"""A decode rank's side of a port: messages are received into staging, checked, then scattered."""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import partial

import torch

from ekiden.cache.layout import KvLayout
from ekiden.core.clock import Clock
from ekiden.core.errors import EkidenError
from kv_transfer import reshard
from kv_transfer.direction import Direction, Emit
from kv_transfer.ledger import Ledger
from kv_transfer.messages import Broken, OpenReceive, Progress, split_tag, tag
from kv_transfer.staging import TRAILER, Slice, open_message, scatter
from kv_transfer.transports.base import Incoming
from kv_transfer.wire import PortOptions, Wire

LIMBO_MESSAGES = 4096
ENDED_NONCES = 4096
PROGRESS_S = 0.2


class _Receiving:
    def __init__(
        self,
        order: OpenReceive,
        pairs: dict[int, reshard.Pair],
        peers: dict[int, int],
        ledger: Ledger,
    ) -> None:
        self.order = order
        self.pairs = pairs
        self.peers = peers
        self.ledger = ledger
        self.sources = len(order.layout.ranks)
        self.segments = reshard.segments(order.start, order.end, order.segment_tokens)
        self.missing = {
            segment * self.sources + source
            for segment in range(len(self.segments))
            for source in pairs
        }
        self.ready: deque[tuple[int, Incoming]] = deque()
        self.said_at = float("-inf")

    def payload(self, index: int) -> int:
        start, end = self.segments[index // self.sources]
        return self.pairs[index % self.sources].token_bytes(self.order.layout) * (end - start)


class Inbound(Direction[_Receiving]):
    """All the sessions that this rank receives for."""

    DOES = "receiving from"

    def __init__(
        self,
        cache_BHL2SD: torch.Tensor,
        layout: KvLayout,
        rank: int,
        epoch: int,
        wire: Wire,
        options: PortOptions,
        clock: Clock,
        emit: Emit,
    ) -> None:
        super().__init__(cache_BHL2SD, layout, rank, epoch, wire, clock, emit)
        self._options = options
        self._by_nonce: dict[int, int] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._limbo: deque[tuple[float, Incoming]] = deque()
        self.discarded = 0
        """Messages thrown away: duplicates, and those of sessions that have ended."""

    def open(self, order: OpenReceive) -> None:
        """Connect to every source rank, so that its loss is heard of, and expect its messages."""
        try:
            mine = [p for p in reshard.pairs(order.layout, self._layout) if p.target == self._rank]
            connect = self._wire.transport.connect
            peers = {pair.source: connect(order.endpoints[pair.source]) for pair in mine}
        except EkidenError as error:
            self._emit(Broken(epoch=self._epoch, session=order.session, reason=error.message))
            return
        count = len(reshard.segments(order.start, order.end, order.segment_tokens))
        ledger = Ledger({(p.source, p.target): count for p in mine}, self._clock)
        pairs = {pair.source: pair for pair in mine}
        self._sessions[order.session] = _Receiving(order, pairs, peers, ledger)
        self._by_nonce[order.nonce] = order.session
        self._turns.append(order.session)
        self._leave_limbo(order.nonce)

    def arrival(self, message: Incoming) -> None:
        """A message is at the door: let it wait for a slot, or throw it away."""
        nonce, index = split_tag(message.tag)
        if (session := self._by_nonce.get(nonce)) is not None:
            self._expected(session, index, message)
        elif nonce in self._ended or len(self._limbo) >= LIMBO_MESSAGES:
            self._discard(message)
        else:
            self._limbo.append((self._clock.now() + self._options.limbo_s, message))

    def peer_lost(self, peer: int, reason: str) -> None:
        for session, receiving in list(self._sessions.items()):
            for source, number in receiving.peers.items():
                if number == peer and not receiving.ledger.complete(source, self._rank):
                    self._break(session, source, reason)
                    break

    def pump(self) -> bool:
        """Start to receive one message of the next session that can; False if none can."""
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            session = self._turns[-1]
            receiving = self._sessions[session]
            if receiving.ready and self._wire.room(self._peer(receiving)):
                self._receive(session, receiving)
                return True
        return False

    def tick(self) -> None:
        """Throw away what has waited too long for its session to be announced."""
        now = self._clock.now()
        while self._limbo and self._limbo[0][0] <= now:
            self._discard(self._limbo.popleft()[1])

    def _expected(self, session: int, index: int, message: Incoming) -> None:
        receiving = self._sessions[session]
        if index not in receiving.missing:
            self._discard(message)
            return
        size = receiving.payload(index) + TRAILER.size
        if message.bytes != size:
            self._discard(message)
            reason = f"message {index} has {message.bytes} bytes, {size} were agreed"
            self._break(session, index % receiving.sources, reason)
            return
        receiving.missing.discard(index)
        receiving.ready.append((index, message))

    def _peer(self, receiving: _Receiving) -> int:
        return receiving.peers[receiving.ready[0][0] % receiving.sources]

    def _receive(self, session: int, receiving: _Receiving) -> None:
        peer = self._peer(receiving)
        index, message = receiving.ready.popleft()
        if message.bytes > self._wire.slots.slot_bytes:
            self._discard(message)
            reason = f"a message of {message.bytes} bytes is too large"
            self._break(session, index % receiving.sources, reason)
            return
        receiving.ledger.started()
        slot = self._wire.slots.take()
        done = partial(self._received, session, index, message.bytes)
        self._wire.receive(session, peer, message.message, slot, message.bytes, done)

    def _received(self, session: int, index: int, size: int, slot: int, error: str) -> None:
        receiving = self._sessions[session]
        source = index % receiving.sources
        if error:
            self._break(session, source, error)
            return
        checksum = open_message(
            self._wire.slots.bytes(slot, size), tag(receiving.order.nonce, index)
        )
        if checksum is None:
            self._break(session, source, f"message {index} does not have its checksum")
            return
        payload = size - TRAILER.size
        self._scatter(receiving, index, self._wire.slots.tensor(slot, payload))
        receiving.ledger.add(source, self._rank, payload, checksum)
        self._tell(session, receiving)

    def _scatter(self, receiving: _Receiving, index: int, staging: torch.Tensor) -> None:
        order = receiving.order
        start, end = receiving.segments[index // receiving.sources]
        pair = receiving.pairs[index % receiving.sources]
        heads, layers = pair.local(self._layout.ranks[self._rank])
        unit = reshard.unit_tokens(order.layout, self._layout)
        runs = tuple(reshard.runs(start, end, unit))
        part = Slice(heads=heads, layers=layers, runs=runs, blocks=order.blocks)
        scatter(staging, part, self._cache)

    def _tell(self, session: int, receiving: _Receiving) -> None:
        ledger, now = receiving.ledger, self._clock.now()
        if ledger.all_complete:
            self._finish(session)
        elif now - receiving.said_at >= PROGRESS_S:
            receiving.said_at = now
            self._emit(Progress(epoch=self._epoch, session=session, bytes=ledger.bytes))

    def _forget(self, session: int) -> bool:
        if (receiving := self._sessions.get(session)) is None:
            return False
        del self._by_nonce[receiving.order.nonce]
        self._ended[receiving.order.nonce] = None
        if len(self._ended) > ENDED_NONCES:
            self._ended.popitem(last=False)
        for _, message in receiving.ready:
            self._discard(message)
        return super()._forget(session)

    def _leave_limbo(self, nonce: int) -> None:
        waiting, self._limbo = self._limbo, deque()
        for until, message in waiting:
            if split_tag(message.tag)[0] == nonce:
                self.arrival(message)
            else:
                self._limbo.append((until, message))

    def _discard(self, message: Incoming) -> None:
        self.discarded += 1
        self._wire.transport.discard(message.message)
