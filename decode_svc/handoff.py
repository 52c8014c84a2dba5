"""Decode's side of one hand-off: the conversation with one prefill replica about one request.

    Start -> Ready -> (reserve blocks, open the session) Reserved -> Started -> HandOff -> Sealed
                                                          ... the KV arrives beside it ...

Ends in one of three ways: the KV was adopted; ``AttemptFailed`` before the hand-off token, so that
another replica may be asked; ``AttemptFailed`` with ``binding`` set after it, so that the request
must go on from the tokens its client has seen.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import msgspec

from ekiden.core.errors import BadRequest, EkidenError
from ekiden.core.types import Request, TokenSources, TransferStats
from ekiden.engine.engine import Reservation
from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc.convert import delta_from_pb, error_from_pb, request_to_pb
from ekiden.service.bridge import or_drop
from ekiden.service.outcome import Outcome
from kv_transfer.session import Arrived, Failed

from .core import DecodeCore
from .lending import Lending
from .peers import PrefillPeer
from .timeline import Timeline

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[pb.PrefillRequest, pb.PrefillEvent]


class AttemptFailed(EkidenError):
    """This attempt is over; ``binding``: after the client saw the hand-off token."""

    def __init__(self, reason: str, *, binding: bool = False) -> None:
        super().__init__(reason)
        self.binding = binding


class Handoff:
    """One attempt. ``run`` returns once the KV is adopted or every choice ended at the hand-off."""

    def __init__(
        self, core: DecodeCore, request: Request, peer: PrefillPeer, timeline: Timeline
    ) -> None:
        self.core = core
        self._timeline = timeline
        self.request = request
        self.peer = peer
        self.state = "asking for prefill"
        self.session = 0
        self.reservation: Reservation
        self.sources = TokenSources()
        self.transfer = TransferStats()
        self.fetch_failure = ""
        """Why prefill computed a prefix that it had tried to fetch from here."""
        self._binding = False
        self._arrival = Outcome[Arrived]()

    @property
    def who(self) -> str:
        return f"prefill replica {self.peer.description.replica_id}"

    async def run(self) -> None:
        """Hold the conversation.

        Raises:
            AttemptFailed: it cannot end well; the reason names the peer and the state.
        """
        call = self.peer.stub.Run(metadata=self.core.peers.metadata)
        try:
            await self._converse(call)
        except AttemptFailed as failure:
            # The session may have failed before the token came that its client has seen since.
            failure.binding = self._binding
            raise
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            raise self._failed(f"the call ended with {code}: {error.details()}") from error
        finally:
            call.cancel()
            self._abandon()

    def _abandon(self) -> None:
        """Stop the writer if it still writes; the blocks it may touch wait for it to let go."""
        if self._arrival.abandon() and self.session:
            self.core.fail_session(self.session, f"abandoned while {self.state}")

    async def _converse(self, call: Call) -> None:
        await self._say(call, pb.PrefillRequest(start=self._start()))
        self.state = "queued there"
        ready = (await self._next(call, "ready")).ready
        self.state = "reserving blocks here"
        await self._reserve(ready.answer_within_s)
        offer = self._open_session()
        await self._say(call, pb.PrefillRequest(reserved=self._reserved(offer)))
        self.state = "about to prefill"
        event = await self._next(call, "started", "fetch")
        if event.WhichOneof("kind") == "fetch":
            self.state = "lending it a prefix"
            await self._lend(call, event.fetch.offer)
            event = await self._next(call, "started")
        self._note_fetch(event.started)
        self._timeline.prefill_started()
        self.state = "prefilling"
        await self._take_tokens((await self._next(call, "hand_off")).hand_off)
        self.state = "transferring"
        self.core.seal_session(self.session, (await self._next(call, "sealed")).sealed.seal)
        await self._adopt()

    def _open_session(self) -> bytes:
        held, end = self.reservation.held_tokens, len(self.request.prompt)
        try:
            self.session, offer = self.core.open_session(
                self,
                self.request.request_id,
                self.peer.description,
                held,
                end,
                self.reservation,
                self.peer.take.wire,
            )
        except EkidenError as error:
            self.core.let_go(self.reservation.key)
            raise self._failed(error.message) from error
        return offer

    def _reserved(self, offer: bytes) -> pb.Reserved:
        held, lend = self.reservation.held_tokens, self.peer.lend
        if lend is None or not held:
            return pb.Reserved(held_tokens=held, offer=offer)
        return pb.Reserved(
            held_tokens=held,
            offer=offer,
            lend_wire=lend.wire,
            lend_bytes_per_s=lend.bytes_per_s,
        )

    async def _lend(self, call: Call, offer: bytes) -> None:
        """Send prefill a part of the prefix that is cached here, or say why not."""
        lending = Lending(self.core, self.request, self.peer.description)
        lent = await lending.run(offer, self.reservation.held_tokens)
        await self._say(call, pb.PrefillRequest(lent=lent))

    def _note_fetch(self, started: pb.Started) -> None:
        self.fetch_failure = started.fetch_failure
        self.transfer = TransferStats(
            fetched_tokens=started.fetched_tokens, fetched_bytes=started.fetched_bytes
        )

    def _start(self) -> pb.PrefillStart:
        return pb.PrefillStart(
            request=request_to_pb(self.request),
            decode_replica=self.core.me.replica_id,
            decode_epoch=self.core.me.epoch,
            prefill_epoch=self.peer.description.epoch,
        )

    async def _say(self, call: Call, message: pb.PrefillRequest) -> None:
        """Tell prefill. Nobody reads while blocks are waited for, so a call that ended meanwhile,
        in whatever way, shows here first; gRPC then takes the write for a mistake of ours."""
        try:
            await call.write(message)
        except asyncio.InvalidStateError as error:
            code, details = await call.code(), await call.details()
            raise self._failed(f"the call had ended with {code.name}: {details}") from error

    async def _next(self, call: Call, *kinds: str) -> pb.PrefillEvent:
        """The next message, which must be of ``kinds``; a failed session ends the wait."""
        reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
        arrival = self._arrival.future
        waits: set[asyncio.Future[Any]] = {reading, arrival}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if arrival.done() and arrival.exception() and not reading.done():
            reading.cancel()
            arrival.result()
        event = await reading
        if not isinstance(event, pb.PrefillEvent):
            raise self._failed("it ended the call too early")
        got = event.WhichOneof("kind")
        if got == "failed":
            error = error_from_pb(event.failed)
            if isinstance(error, BadRequest) and error.field == "decode_replica":
                self.core.peers.forget(self.peer)
            raise self._failed(error.message)
        if got not in kinds:
            raise self._failed(f"it said {got} where {' or '.join(kinds)} was due")
        return event

    async def _reserve(self, within_s: float) -> None:
        """Blocks for the whole prompt, waiting for room no longer than prefill waits for us."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    freed = self.core.freed
                    if (reservation := await self._try_reserve()) is not None:
                        self.reservation = reservation
                        return
                    await freed.wait()
        except TimeoutError as error:
            raise self._failed(f"no room for the prompt's blocks within {within_s:g} s") from error

    async def _try_reserve(self) -> Reservation | None:
        """One look for room. A reservation that comes when nobody waits for it any more has no
        writer: its blocks are let go."""
        asking = self.core.bridge.call(lambda engine: engine.reserve(self.request))
        return await or_drop(asking, self._let_go)

    def _let_go(self, reservation: Reservation | None) -> None:
        if reservation is not None:
            self.core.let_go(reservation.key)

    async def _take_tokens(self, message: pb.HandOff) -> None:
        """Emit the hand-off tokens: from here on they bind whatever happens."""
        held, prompt = self.reservation.held_tokens, len(self.request.prompt)
        cached = max(0, min(message.cached_tokens, prompt) - held)
        self.sources = TokenSources(
            decode_cache=held,
            prefill_cache=cached,
            prefill_computed=prompt - held - cached,
            reason=f"prefilled on {self.peer.description.replica_id}",
        )
        deltas = [delta_from_pb(delta) for delta in message.deltas]
        await self.core.bridge.call(lambda engine: engine.hand_off(self.request.request_id, deltas))
        self._binding = True

    async def _adopt(self) -> None:
        arrived = await self._arrival.future
        self.transfer = msgspec.structs.replace(
            self.transfer, bytes=arrived.bytes, seconds=arrived.seconds, wire=arrived.wire
        )
        await self.core.bridge.call(lambda engine: engine.adopt(self.request.request_id))

    def on_arrived(self, event: Arrived) -> None:
        """The KV is in the reserved blocks, counted and checked."""
        self._arrival.good(event)

    def on_failed(self, event: Failed) -> None:
        """The session ended without its KV."""
        self._arrival.bad(self._failed(event.reason))

    def _failed(self, reason: str) -> AttemptFailed:
        return AttemptFailed(f"{self.who}, {self.state}: {reason}", binding=self._binding)
