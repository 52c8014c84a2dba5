"""A rank's receiving side of a port.

On a wire that moves messages they are received into staging, checked, then scattered. On a mapped
wire they are notices: the segment is copied out of the sender's pool, and the sender told so.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial

import torch

from ekiden.cache.layout import KvLayout
from ekiden.core.clock import Clock
from ekiden.core.errors import EkidenError, ReplicaFailed
from kv_transfer import reshard
from kv_transfer.direction import PROGRESS_S, Direction, Emit
from kv_transfer.ledger import Ledger
from kv_transfer.mapped import as_cache
from kv_transfer.messages import TAKEN, Broken, OpenReceive, Progress, split_tag, tag
from kv_transfer.options import PortOptions
from kv_transfer.receiving import Receiving
from kv_transfer.staging import TRAILER, Message, Slice, move, open_message, scatter
from kv_transfer.transports.base import Incoming, Pieces
from kv_transfer.wire import Wire

LIMBO_MESSAGES = 4096
ENDED_NONCES = 4096


class Inbound(Direction[Receiving]):
    """All the sessions that this rank receives for."""

    DOES = "receiving from"

    def __init__(
        self,
        cache_BHL2SD: torch.Tensor,
        layout: KvLayout,
        rank: int,
        epoch: int,
        wires: Mapping[str, Wire],
        options: PortOptions,
        clock: Clock,
        emit: Emit,
    ) -> None:
        super().__init__(cache_BHL2SD, layout, rank, epoch, wires, clock, emit)
        self._options = options
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._limbo: deque[tuple[float, Wire, Incoming]] = deque()
        self.discarded = 0
        """Messages thrown away: duplicates, and those of sessions that have ended."""

    def open(self, order: OpenReceive) -> None:
        """Connect to every source rank, so that its loss is heard of, and expect its messages."""
        try:
            mine = [p for p in reshard.pairs(order.layout, self._layout) if p.target == self._rank]
            wire = self._wire_of(order)
            peers = {pair.source: self._connect(wire, order, pair.source) for pair in mine}
        except EkidenError as error:
            self._emit(Broken(epoch=self._epoch, session=order.session, reason=error.message))
            return
        count = len(reshard.segments(order.start, order.end, order.segment_tokens))
        ledger = Ledger({(p.source, p.target): count for p in mine}, self._clock)
        pairs = {pair.source: pair for pair in mine}
        self._begin(Receiving(order, wire, pairs, peers, ledger))
        self._leave_limbo(order.nonce)

    def arrival(self, wire: Wire, message: Incoming) -> None:
        """A message is at the door: let it wait for a slot, or throw it away."""
        nonce, index = split_tag(message.tag)
        session = self._by_nonce.get(nonce)
        if session is not None and self._sessions[session].wire is wire:
            self._expected(session, index, message)
        elif session is not None or nonce in self._ended or len(self._limbo) >= LIMBO_MESSAGES:
            self._discard(wire, message)
        else:
            self._limbo.append((self._clock.now() + self._options.limbo_s, wire, message))

    def peer_lost(self, wire: Wire, peer: int, reason: str) -> None:
        for session, receiving in list(self._sessions.items()):
            if receiving.wire is not wire:
                continue
            for source, number in receiving.peers.items():
                if number == peer and not receiving.ledger.complete(source, self._rank):
                    self._break(session, source, reason)
                    break

    def pump(self) -> bool:
        """Start to receive one message of the next session that can, or read one segment out of
        its sender's pool; False if none can."""
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            session = self._turns[-1]
            receiving = self._sessions[session]
            if receiving.noticed and self._read(session, receiving):
                return True
            if receiving.ready and receiving.wire.may_receive(self._peer(receiving)):
                self._receive(session, receiving)
                return True
        return False

    def tick(self) -> None:
        """Throw away what has waited too long for its session to be announced."""
        now = self._clock.now()
        while self._limbo and self._limbo[0][0] <= now:
            _, wire, message = self._limbo.popleft()
            self._discard(wire, message)

    def _expected(self, session: int, index: int, message: Incoming) -> None:
        receiving = self._sessions[session]
        if index not in receiving.missing:
            self._discard(receiving.wire, message)
            return
        size = receiving.message_bytes(index)
        if message.bytes != size:
            self._discard(receiving.wire, message)
            reason = f"message {index} has {message.bytes} bytes, {size} were agreed"
            self._break(session, index % receiving.sources, reason)
            return
        receiving.missing.discard(index)
        receiving.ready.append((index, message))

    def _peer(self, receiving: Receiving) -> int:
        return receiving.peers[receiving.ready[0][0] % receiving.sources]

    def _receive(self, session: int, receiving: Receiving) -> None:
        peer = self._peer(receiving)
        index, message = receiving.ready.popleft()
        wire = receiving.wire
        if message.bytes > wire.slots.slot_bytes:
            self._discard(wire, message)
            reason = f"a message of {message.bytes} bytes is too large"
            self._break(session, index % receiving.sources, reason)
            return
        receiving.ledger.started()
        slot = wire.slots.take()
        pieces = self._pieces(receiving, index)
        expected = wire.slots.message(slot, message.bytes - TRAILER.size, pieces)
        done = partial(self._received, session, index, expected)
        wire.receive(session, peer, message.message, slot, expected.whole, done)

    def _pieces(self, receiving: Receiving, index: int) -> Pieces | None:
        """Where in the cache a message can come straight to, if the wire can do that."""
        same = receiving.order.layout.dtype == self._layout.dtype
        if receiving.wire.in_place is None or not same:
            return None
        return self._in_place.pieces(self._ours(receiving, index))

    def _received(self, session: int, index: int, message: Message, slot: int, error: str) -> None:
        receiving = self._sessions[session]
        source = index % receiving.sources
        if error:
            self._break(session, source, error)
            return
        checksum = open_message(message, tag(receiving.order.nonce, index) ^ receiving.order.key)
        if checksum is None:
            self._break(session, source, f"message {index} does not have its checksum")
        elif receiving.wire.mapped is not None:
            receiving.note(index, message.payload[0], checksum)
        else:
            if not message.in_place:
                self._scatter(receiving, index, slot)
            self._count(session, receiving, index, checksum)

    def _read(self, session: int, receiving: Receiving) -> bool:
        """Copy the segment of the next notice, and say so to its sender; False if not now."""
        wire = receiving.wire
        index, checksum = receiving.noticed[0]
        source = index % receiving.sources
        peer = receiving.peers[source]
        if wire.pace.delay():
            return False
        try:
            pool = self._pool(receiving, source)
        except ReplicaFailed as error:
            self._break(session, source, error.message)
            return True
        if pool is None:
            return False
        receiving.noticed.popleft()
        receiving.ledger.started()
        if receiving.tables[source].max() >= len(pool):
            self._break(session, source, f"its pool has {len(pool)} blocks, and it named others")
            return True
        self._move(receiving, index, pool)
        wire.pace.charge(receiving.payload(index))
        answer = index // receiving.sources * len(self._layout.ranks) + self._rank
        wire.say(peer, tag(receiving.order.nonce, answer | TAKEN))
        self._count(session, receiving, index, checksum)
        return True

    def _pool(self, receiving: Receiving, source: int) -> torch.Tensor | None:
        """The pool of a source as blocks, or None if it is not mapped yet.

        Raises:
            ReplicaFailed: it will not be, or is not what its layout says.
        """
        if source not in receiving.pools and (mapped := receiving.wire.mapped) is not None:
            if (pool := mapped.pool(receiving.peers[source])) is None:
                return None
            receiving.pools[source] = as_cache(pool, receiving.order.layout, source)
        return receiving.pools[source]

    def _move(self, receiving: Receiving, index: int, pool_BHL2SD: torch.Tensor) -> None:
        order, source = receiving.order, index % receiving.sources
        ours, table = self._ours(receiving, index), receiving.tables[source]
        heads, layers = receiving.pairs[source].local(order.layout.ranks[source])
        theirs = Slice(heads=heads, layers=layers, runs=ours.runs, blocks=table.tolist())
        move(pool_BHL2SD, theirs, self._cache, ours)

    def _count(self, session: int, receiving: Receiving, index: int, checksum: int) -> None:
        source, payload = index % receiving.sources, receiving.payload(index)
        receiving.ledger.add(source, self._rank, payload, checksum)
        self._tell(session, receiving)

    def _scatter(self, receiving: Receiving, index: int, slot: int) -> None:
        part, dtype = self._ours(receiving, index), receiving.order.layout.dtype
        staging = receiving.wire.slots.tensor(slot, receiving.payload(index))
        scatter(staging, part, self._cache, dtype)

    def _ours(self, receiving: Receiving, index: int) -> Slice:
        """Where message ``index`` belongs in this rank's cache."""
        order = receiving.order
        start, end = receiving.segments[index // receiving.sources]
        pair = receiving.pairs[index % receiving.sources]
        heads, layers = pair.local(self._layout.ranks[self._rank])
        unit = reshard.unit_tokens(order.layout, self._layout)
        runs = tuple(reshard.runs(start, end, unit))
        return Slice(heads=heads, layers=layers, runs=runs, blocks=order.blocks)

    def _tell(self, session: int, receiving: Receiving) -> None:
        ledger, now = receiving.ledger, self._clock.now()
        if ledger.all_complete:
            self._finish(session)
        elif now - receiving.said_at >= PROGRESS_S:
            receiving.said_at = now
            self._emit(Progress(epoch=self._epoch, session=session, bytes=ledger.bytes))

    def _forget(self, session: int) -> bool:
        if (receiving := self._sessions.get(session)) is None:
            return False
        self._ended[receiving.order.nonce] = None
        if len(self._ended) > ENDED_NONCES:
            self._ended.popitem(last=False)
        for _, message in receiving.ready:
            self._discard(receiving.wire, message)
        return super()._forget(session)

    def _leave_limbo(self, nonce: int) -> None:
        waiting, self._limbo = self._limbo, deque()
        for until, wire, message in waiting:
            if split_tag(message.tag)[0] == nonce:
                self.arrival(wire, message)
            else:
                self._limbo.append((until, wire, message))

    def _discard(self, wire: Wire, message: Incoming) -> None:
        self.discarded += 1
        wire.transport.discard(message.message)
