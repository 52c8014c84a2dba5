"""One multiplexed stream to one life of a decode replica.

Submissions and cancellations go down, one message of deltas an engine step comes up, and is dealt
to the inboxes of the requests. When the stream breaks, every request it held ends at once with
ReplicaFailed, and the link dials again until it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from ekiden.core.errors import EkidenError, Overloaded, ReplicaFailed, Unavailable
from ekiden.core.types import Completion, Delta, PrefillCandidate, Request
from ekiden.rpc import decode_pb2 as pb
from ekiden.rpc.channel import auth_metadata, open_channel
from ekiden.rpc.convert import (
    candidate_to_pb,
    completion_from_pb,
    delta_from_pb,
    error_from_pb,
    request_to_pb,
)
from ekiden.rpc.decode_pb2_grpc import DecodeStub

log = logging.getLogger(__name__)

Event = Delta | Completion | EkidenError

CONNECT_S = 3.0
_CLOSED = "the gateway closed the stream"
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
MAX_PENDING_TOKENS = 1 << 16
"""Tokens that wait for a client who does not read; past it the request is cancelled."""


class Inbox:
    """What has come for one request and was not taken yet, in order."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._tokens = 0
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: Event) -> bool:
        """False if the request's reader is too far behind; ``event`` is dropped then."""
        if isinstance(event, Delta):
            self._tokens += len(event.tokens)
            if self._tokens > MAX_PENDING_TOKENS:
                return False
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return True

    async def take(self) -> list[Event]:
        """Everything that is there; waits until something is. For one reader."""
        if not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events, self._tokens = self._events, [], 0
        return events


class DecodeLink:
    """Used from one event loop. ``connected`` says whether it takes requests now."""

    def __init__(
        self,
        replica_id: str,
        address: str,
        *,
        secret: str = "",
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self.replica_id, self.address = replica_id, address
        self.connected = False
        self.trouble = "not connected yet"
        self._metadata = auth_metadata(secret)
        self._dial = dial
        self._heard = False
        self._told = ""
        self._inboxes: dict[str, Inbox] = {}
        self._down: asyncio.Queue[pb.ServeRequest] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link-{self.replica_id}")

    async def close(self) -> None:
        """End the stream; what it still held fails."""
        self._told = _CLOSED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._broken(_CLOSED)

    @property
    def in_flight(self) -> int:
        return len(self._inboxes)

    async def idle(self) -> None:
        """Return once no request is in flight; each ends by its own deadline."""
        await self._idle.wait()

    async def settled(self, timeout_s: float) -> bool:
        """Wait for the first dial to end either way; whether it is connected then."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self.connected

    def submit(self, request: Request, prefill: Sequence[PrefillCandidate]) -> Inbox:
        """Send a request down.

        Raises:
            Unavailable: the stream is not up.
        """
        if not self.connected:
            raise Unavailable(f"decode replica {self.replica_id}: {self.trouble}")
        inbox = self._inboxes[request.request_id] = Inbox()
        self._idle.clear()
        candidates = [candidate_to_pb(candidate) for candidate in prefill]
        submit = pb.Submit(request=request_to_pb(request), prefill=candidates)
        # The queue holds at most one submission and one cancellation for each request in flight,
        # and the gateway bounds those.
        self._down.put_nowait(pb.ServeRequest(submit=submit))
        return inbox

    def cancel(self, request_id: str) -> None:
        """Stop a request. Unknown ones, ended ones too, are none of the replica's business."""
        if self._forget(request_id):
            cancel = pb.Cancel(request_id=request_id)
            self._down.put_nowait(pb.ServeRequest(cancel=cancel))

    def fail_all(self, error: EkidenError) -> None:
        """End every request with ``error`` and cancel it on the replica."""
        for request_id, inbox in list(self._inboxes.items()):
            self.cancel(request_id)
            inbox.put(error)

    async def _run(self) -> None:
        attempt = 0
        while True:
            self._heard = False
            await self._serve_once()
            # A stream that is refused (a wrong secret) opens too: only an event proves it works.
            attempt = 0 if self._heard else attempt + 1
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])

    async def _serve_once(self) -> None:
        """Dial and serve until the stream breaks."""
        channel = self._dial(self.address)
        try:
            async with asyncio.timeout(CONNECT_S):
                await channel.channel_ready()
            call = DecodeStub(channel).Serve(metadata=self._metadata)
            self._up()
            await self._pump(call)
            self._broken("it ended the stream")
        except grpc.aio.AioRpcError as error:
            self._broken(error.details() or error.code().name)
        except TimeoutError:
            self._broken(f"{self.address} does not answer within {CONNECT_S:g} s")
        finally:
            await channel.close(None)

    async def _pump(self, call: Any) -> None:
        writer = asyncio.create_task(self._write(call))
        try:
            async for event in call:
                self._heard = True
                self._deal(event)
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while True:
            message = await self._down.get()
            await call.write(message)

    def _deal(self, event: pb.ServeEvent) -> None:
        for delta in event.deltas:
            self._give(delta.request_id, delta_from_pb(delta))
        for completion in event.completions:
            self._give(completion.request_id, completion_from_pb(completion), last=True)
        for error in event.errors:
            self._give(error.request_id, error_from_pb(error), last=True)

    def _give(self, request_id: str, event: Event, *, last: bool = False) -> None:
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return  # cancelled a moment ago
        if last:
            self._forget(request_id)
        if not inbox.put(event):
            self.cancel(request_id)
            inbox.put(Overloaded("the client reads its stream too slowly; the request was stopped"))

    def _forget(self, request_id: str) -> bool:
        known = self._inboxes.pop(request_id, None) is not None
        if not self._inboxes:
            self._idle.set()
        return known

    def _up(self) -> None:
        log.debug("connected to decode replica %s at %s", self.replica_id, self.address)
        self.connected, self.trouble = True, ""
        self._changed.set()

    def _broken(self, why: str) -> None:
        if why != self._told:
            log.warning("decode replica %s at %s: %s", self.replica_id, self.address, why)
        self.connected, self.trouble, self._told = False, why, why
        self._changed.set()
        inboxes, self._inboxes = self._inboxes, {}
        self._idle.set()
        self._down = asyncio.Queue()
        for inbox in inboxes.values():
            inbox.put(
                ReplicaFailed(f"decode replica {self.replica_id} failed with the request: {why}")
            )
