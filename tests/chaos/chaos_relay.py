"""What stands between decode and one prefill replica: it passes every call on, message by message.

A trap holds one message of one request, so that a hand-off stays in the state before it until a
fault has been injected. A held message is what a slow network would give; nothing is changed unless
the trap is sprung with a lie (an answer that a broken prefill might give).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc.channel import CHANNEL_OPTIONS, open_channel

POINTS = ("start", "ready", "reserved", "started", "hand_off", "sealed")
LIES = ("says failed", "ends in an error", "closes", "talks nonsense", "says nothing more")
_RUN = "/ekiden.rpc.Prefill/Run"
HOLD_S = 90.0


class Trap:
    """Waits for the request with ``prompt``; holds it before ``point``, or only watches it."""

    def __init__(self, prompt: Sequence[int], point: str = "") -> None:
        self.prompt, self.point = tuple(prompt), point
        self.lie = ""
        self.prefill = self.decode = ""
        self.passed: list[str] = []
        """Messages that were let through, in order."""
        self.seen = asyncio.Event()
        self.reached = asyncio.Event()
        self.sprung = asyncio.Event()

    def spring(self, lie: str = "") -> None:
        """Let go of the message, or answer ``lie`` in its place."""
        self.lie = lie
        self.sprung.set()


class _Lied(Exception):
    """The call ends here with a lie."""


class Relay:
    """One life of a prefill replica as decode sees it, and the traps that wait for requests."""

    def __init__(self, name: str, host: str, traps: list[Trap]) -> None:
        self.name = name
        self.traps = traps
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        self._channel: grpc.aio.Channel | None = None

    async def start(self, upstream: str) -> None:
        """Pass calls on to the replica at ``upstream``."""
        self._channel = open_channel(upstream)
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(None)
        if self._channel is not None:
            await self._channel.close(None)

    async def unary(self, method: str, request: bytes, context: Any) -> bytes:
        call = self._to().unary_unary(method)(request, timeout=context.time_remaining())
        try:
            return bytes(await call)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
            raise

    async def run(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """One ``Prefill.Run``."""
        call = self._to().stream_stream(_RUN)()
        conversation = _Conversation(self, call)
        rising = asyncio.ensure_future(conversation.rise(requests))
        try:
            async for answer in conversation.answers(rising):
                yield answer
        except _Lied as lie:
            if str(lie) == "ends in an error":
                await context.abort(grpc.StatusCode.INTERNAL, "the harness lied")
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        finally:
            rising.cancel()
            call.cancel()

    def trap_for(self, start: pb.PrefillStart) -> Trap | None:
        prompt = tuple(start.request.prompt)
        found = next((trap for trap in self.traps if trap.prompt == prompt), None)
        if found is not None:
            self.traps.remove(found)
            found.prefill, found.decode = self.name, start.decode_replica
            found.seen.set()
        return found

    def _to(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError(f"the relay of {self.name} points nowhere")
        return self._channel


class _Conversation:
    def __init__(self, relay: Relay, call: Any) -> None:
        self._relay, self._call = relay, call
        self._trap: Trap | None = None
        self._over = asyncio.Event()
        call.add_done_callback(lambda _: self._over.set())

    async def rise(self, requests: AsyncIterator[bytes]) -> None:
        """Decode's messages. Raises _Lied if one is to be answered with a lie."""
        async for data in requests:
            message = pb.PrefillRequest.FromString(data)
            kind = str(message.WhichOneof("kind"))
            if kind == "start":
                self._trap = self._relay.trap_for(message.start)
            await self._pass(kind)
            await self._call.write(data)
        await self._call.done_writing()

    async def answers(self, rising: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """Prefill's messages, and what is said in their place."""
        while True:
            try:
                data = await self._next(rising)
            except _Lied as told:
                if (lie := _spoken(str(told))) is not None:
                    yield lie
                raise
            if data is grpc.aio.EOF:
                if (code := await self._call.code()) is not grpc.StatusCode.OK:
                    raise grpc.aio.AioRpcError(code, None, None, await self._call.details())
                return
            kind = str(pb.PrefillEvent.FromString(data).WhichOneof("kind"))
            try:
                await self._pass(kind)
            except _Lied as told:
                if (lie := _spoken(str(told))) is not None:
                    yield lie
                raise
            yield data

    async def _next(self, rising: asyncio.Future[None]) -> Any:
        """Prefill's next message. Raises _Lied if one of decode's is answered with a lie."""
        reading = asyncio.ensure_future(self._call.read())
        waits: set[asyncio.Future[Any]] = {reading} | ({rising} if not rising.done() else set())
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and isinstance(error := rising.exception(), _Lied):
                raise error
            return await reading
        finally:
            reading.cancel()
            reading.add_done_callback(_seen)

    async def _pass(self, kind: str) -> None:
        trap = self._trap
        if trap is None:
            return
        if kind == trap.point and not trap.sprung.is_set():
            trap.reached.set()
            await self._hold(trap)
        if kind == trap.point and trap.lie:
            if trap.lie == "says nothing more":
                await asyncio.sleep(HOLD_S)
            raise _Lied(trap.lie)
        trap.passed.append(kind)

    async def _hold(self, trap: Trap) -> None:
        """Until the trap is sprung; a call that breaks meanwhile takes the message with it."""
        sprung = asyncio.ensure_future(trap.sprung.wait())
        over = asyncio.ensure_future(self._over.wait())
        try:
            async with asyncio.timeout(HOLD_S):
                await asyncio.wait({sprung, over}, return_when=asyncio.FIRST_COMPLETED)
                if not sprung.done() and await self._call.code() is grpc.StatusCode.OK:
                    await sprung  # prefill has said all it had to say: not broken
        finally:
            sprung.cancel()
            over.cancel()
        if not trap.sprung.is_set():
            code, details = await self._call.code(), await self._call.details()
            raise grpc.aio.AioRpcError(code, None, None, details)


def _spoken(lie: str) -> bytes | None:
    """What a lie says before the call ends, if anything."""
    if lie == "says failed":
        event = pb.PrefillEvent()
        event.failed.message = "the harness lied"
        event.failed.code = "replica_failed"
        return bytes(event.SerializeToString())
    if lie == "talks nonsense":
        return bytes(pb.PrefillEvent(ready=pb.Ready(answer_within_s=1.0)).SerializeToString())
    return None


def _seen(reading: asyncio.Future[Any]) -> None:
    """How a read ended that nobody waits for any more makes no difference."""
    if not reading.cancelled():
        reading.exception()


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def service(self, details: Any) -> Any:
        method = details.method
        if method == _RUN:
            return grpc.stream_stream_rpc_method_handler(self._relay.run)
        relay = self._relay

        async def unary(request: bytes, context: Any) -> bytes:
            return await relay.unary(method, request, context)

        return grpc.unary_unary_rpc_method_handler(unary)
