"""The port of one rank: the KV transport as the engine sees it, with one thread of its own.

``open_port`` is what a service names to the engine (``kv_transfer.port:open_port``); its
``PortContext.options`` are an encoded ``PortOptions``. The life of a session here: an order to
send or to receive comes from the service; messages move (``outbound``, ``inbound``); one last word
goes back (``Finished``, ``Broken`` or ``Aborted``), and from then on the cache is not touched.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from ekiden.cache.layout import KV_BYTES
from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.errors import InvariantBroken, SetupError
from ekiden.core.hashes import GRANULE
from ekiden.engine.port import ChunkDone, PortContext
from kv_transfer.inbound import Inbound
from kv_transfer.messages import (
    TAKEN,
    Abort,
    Aborted,
    BlockRead,
    Broken,
    Command,
    Computed,
    OpenReceive,
    PortEvent,
    ReadBlock,
    decode_command,
    encode,
    pack_endpoints,
    split_tag,
)
from kv_transfer.options import PortOptions
from kv_transfer.outbound import Outbound
from kv_transfer.poller import Poller
from kv_transfer.reshard import MESSAGE_BYTES
from kv_transfer.staging import TRAILER, Slots
from kv_transfer.transports import open_transports
from kv_transfer.transports.base import Completed, Event, Incoming, Transport
from kv_transfer.wire import Pace, Wire

logger = logging.getLogger(__name__)

IDLE_S = 1.0
CLOSE_S = 5.0
INBOX_COMMANDS = 65536


def open_port(cache: torch.Tensor, context: PortContext, emit: Callable[[bytes], None]) -> Port:
    """A running port over ``cache`` [blocks, kv_heads, layers, 2, block_size, head_dim].

    Raises:
        SetupError: the options cannot be read, the wire cannot run here, or it cannot use the
            staging memory; the rank must not become ready.
    """
    try:
        options = msgspec.msgpack.decode(context.options, type=PortOptions)
    except msgspec.MsgspecError as error:
        raise SetupError(f"the options of the KV port cannot be read: {error}") from error
    transports = open_transports(options, context.pool_fd)
    try:
        port = Port(cache, context, emit, options, transports)
    except BaseException:
        for transport in transports.values():
            transport.close()
        raise
    port.start()
    return port


class Port:
    """Implements ``ekiden.engine.port.KvPort``. ``start`` runs ``step`` on a thread; a test may
    call ``step`` itself instead."""

    def __init__(
        self,
        cache_BHL2SD: torch.Tensor,
        context: PortContext,
        emit: Callable[[bytes], None],
        options: PortOptions,
        transports: Mapping[str, Transport],
        clock: Clock | None = None,
    ) -> None:
        _check_cache(cache_BHL2SD, context)
        clock = clock or MonotonicClock()
        slots = Slots(options.slots, _slot_bytes(context), pinned=cache_BHL2SD.is_cuda)
        for transport in transports.values():
            transport.register(slots.arena)
        self._pace = pace = Pace(options.max_bytes_per_s, clock)
        self._wires = wires = {
            name: Wire(transport, slots, options, clock, pace)
            for name, transport in transports.items()
        }
        self._poller = Poller(fd for transport in transports.values() for fd in transport.fds)
        self._endpoints = pack_endpoints({n: t.describe() for n, t in transports.items()})
        self._rank, self._epoch = context.rank, context.epoch
        self._cache_BHL2SD = cache_BHL2SD
        self._emit_bytes = emit
        layout, rank, epoch = context.layout, context.rank, context.epoch
        self.outbound = Outbound(cache_BHL2SD, layout, rank, epoch, wires, clock, self._emit)
        self.inbound = Inbound(cache_BHL2SD, layout, rank, epoch, wires, options, clock, self._emit)
        self._lock = threading.Lock()
        self._inbox: deque[Command] = deque()
        self._chunks: dict[int, ChunkDone] = {}
        self._closing = False
        self._dead = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-port", daemon=True)
        self._thread.start()

    @property
    def quarantined(self) -> int:
        """Staging slots that the wire still holds for sessions that were given up."""
        return sum(wire.quarantined for wire in self._wires.values())

    def describe(self) -> bytes:
        return self._endpoints

    def command(self, message: bytes) -> None:
        order = decode_command(message)
        with self._lock:
            if self._dead:
                self._refuse(order)
                self._give_up()
                return
            if len(self._inbox) >= INBOX_COMMANDS:
                raise InvariantBroken(f"the KV port has {INBOX_COMMANDS} commands waiting")
            self._inbox.append(order)
            self._poller.wake()

    def chunks_finished(self, chunks: Sequence[ChunkDone]) -> None:
        with self._lock:
            if self._dead:
                self._give_up()
                return
            # Only the latest of a session counts, so what waits is bounded by the sessions.
            self._chunks.update((chunk.session, chunk) for chunk in chunks)
            self._poller.wake()

    def close(self) -> None:
        self._closing = True
        if self._thread is None:
            self._end("")
            return
        with self._lock:
            if not self._dead:
                self._poller.wake()
        self._thread.join(CLOSE_S)

    def step(self, timeout_s: float) -> bool:
        """One round; waits at most ``timeout_s``. True if more can be done at once."""
        events = self._poll()
        if not events and timeout_s > 0:
            self._sleep(timeout_s)
            events = self._poll()
        self._obey()
        for wire, event in events:
            self._heard(wire, event)
        for wire in self._wires.values():
            wire.tick()
        self.inbound.tick()
        # One message each way, then back to the wire: a gather must not hold up what arrives.
        received, sent = self.inbound.pump(), self.outbound.pump()
        return received or sent

    def _poll(self) -> list[tuple[Wire, Event]]:
        return [(wire, e) for wire in self._wires.values() for e in wire.transport.poll()]

    def _sleep(self, timeout_s: float) -> None:
        """Until a wire has something to do, somebody has a command, or more may be sent."""
        waits = [timeout_s, *(wire.transport.idle() for wire in self._wires.values())]
        if delay := self._pace.delay():
            waits.append(delay)
        self._poller.sleep(min(waits))

    def _heard(self, wire: Wire, event: Event) -> None:
        if isinstance(event, Incoming):
            answer = split_tag(event.tag)[1] & TAKEN
            (self.outbound if answer else self.inbound).arrival(wire, event)
        elif isinstance(event, Completed):
            wire.completed(event)
        else:
            self.inbound.peer_lost(wire, event.peer, event.reason)
            self.outbound.peer_lost(wire, event.peer, event.reason)

    def _run(self) -> None:
        failure = ""
        try:
            more = False
            while not self._closing:
                more = self.step(0.0 if more else IDLE_S)
        except Exception as error:
            logger.exception("the KV port of rank %d has ended", self._rank)
            failure = f"the KV port's thread failed: {type(error).__name__}: {error}"
        self._end(failure)

    def _end(self, failure: str) -> None:
        """From here on nothing is touched; whatever is open or comes gets its last word."""
        with self._lock:
            if self._dead:
                return
            self._dead = failure or "the KV port was closed"
        for order in self._inbox:
            self._refuse(order)
        self.inbound.end_all(failure)
        self.outbound.end_all(failure)
        for wire in self._wires.values():
            wire.transport.close()
        self._poller.close()

    def _give_up(self) -> None:
        """A port that failed takes its rank with it: the replica could never hand over again, and
        is better started anew than asked for ever.

        Raises:
            InvariantBroken: it did not end because it was closed.
        """
        if not self._closing:
            raise InvariantBroken(self._dead)

    def _obey(self) -> None:
        with self._lock:
            orders, self._inbox = self._inbox, deque()
            chunks, self._chunks = self._chunks, {}
        for order in orders:
            if isinstance(order, Abort):
                self._abort(order.session)
            elif isinstance(order, ReadBlock):
                self._read(order)
            elif isinstance(order, Computed):
                self.outbound.computed(order.session, order.end, order.blocks, held=order.held)
            elif isinstance(order, OpenReceive):
                self.inbound.open(order)
            else:
                self.outbound.open(order)
        for chunk in chunks.values():
            self.outbound.computed(chunk.session, chunk.end, chunk.blocks)

    def _abort(self, session: int) -> None:
        # A session that is not open here has had its last word, or never began: saying it once
        # more does no harm, and a lost one must not leave the service waiting.
        if not self.inbound.abort(session) and not self.outbound.abort(session):
            self._emit(Aborted(epoch=self._epoch, session=session))

    def _read(self, order: ReadBlock) -> None:
        block = self._cache_BHL2SD[order.block].cpu().contiguous().view(torch.uint8)
        self._emit(BlockRead(ticket=order.ticket, data=block.numpy().tobytes()))

    def _refuse(self, order: Command) -> None:
        if isinstance(order, ReadBlock):
            self._emit(BlockRead(ticket=order.ticket, data=None))
            return
        if isinstance(order, Abort):
            self._emit(Aborted(epoch=self._epoch, session=order.session))
        elif not isinstance(order, Computed):
            self._emit(Broken(epoch=self._epoch, session=order.session, reason=self._dead))

    def _emit(self, event: PortEvent | BlockRead) -> None:
        self._emit_bytes(encode(event))


def _slot_bytes(context: PortContext) -> int:
    """Room for a message of the usual size, or of one granule of this rank in the widest KV dtype
    if that is more: prefill's rows may be wider than ours."""
    layout = context.layout
    heads, layers, two, _, _ = layout.block_shape(context.rank)
    granule = heads * layers * two * GRANULE * layout.head_dim * max(KV_BYTES.values())
    return max(MESSAGE_BYTES, granule) + TRAILER.size


def _check_cache(cache: torch.Tensor, context: PortContext) -> None:
    if cache.device.type not in ("cpu", "cuda"):
        raise SetupError(
            f"KV cannot be moved out of a cache on {cache.device}: use --device cpu or cuda"
        )
    if tuple(cache.shape[1:]) != context.layout.block_shape(context.rank):
        raise InvariantBroken(
            f"the cache has blocks of shape {tuple(cache.shape[1:])}, its layout says "
            f"{context.layout.block_shape(context.rank)}"
        )
