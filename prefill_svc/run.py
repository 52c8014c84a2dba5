"""Prefill's side of one hand-off: one ``Prefill.Run`` call.

1. Start: the request joins the queue; no block is held yet
2. its turn is near: say Ready, wait for Reserved (so prefill never computes what has nowhere
   to go, and decode holds no memory while we queue)
3. chunks are computed; each rank's port sends them while the next one computes
4. the first token of every choice goes up at once as HandOff
5. the last bytes are with the wire: Sealed
6. the blocks are let go when the session has drained, whatever became of the call
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import msgspec

from ekiden.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EkidenError,
    ReplicaFailed,
)
from ekiden.core.types import Delta
from ekiden.engine.engine import PrefillDone, Ready, Started
from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc.convert import delta_to_pb, request_from_pb
from ekiden.service.servicer import check_model
from kv_transfer.description import ReplicaDescription
from kv_transfer.session import Failed, SealedOut

from .core import Happening, PrefillCore
from .fetch import FETCH_S, PrefixFetch

START_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 20.0
"""How long decode may take to find room after Ready."""

E = TypeVar("E")


class PrefillRun:
    """One call. ``events`` yields what decode is told."""

    def __init__(self, core: PrefillCore) -> None:
        self._core = core
        self._session = 0
        self._sealed = False
        self._deltas: list[Delta] = []
        self._early: list[Happening] = []
        self._local_id = ""
        self._inbox: asyncio.Queue[Happening]

    async def events(
        self, requests: AsyncIterator[pb.PrefillRequest]
    ) -> AsyncGenerator[pb.PrefillEvent, None]:
        """The conversation, from Start to Sealed.

        Raises:
            EkidenError: the request is refused, or the prefill or its transfer failed.
        """
        message = await _receive(requests, START_TIMEOUT_S, "Start")
        start = message.start
        peer = self._check(start)
        self._local_id, self._inbox = self._core.open_run(start.request.request_id)
        try:
            request = request_from_pb(start.request)
            local = msgspec.structs.replace(request, request_id=self._local_id)
            await self._core.bridge.call(lambda engine: engine.add_handoff(local))
            await self._next(Ready)
            yield pb.PrefillEvent(ready=pb.Ready(answer_within_s=ANSWER_TIMEOUT_S))
            reserved = (await _receive(requests, ANSWER_TIMEOUT_S, "Reserved")).reserved
            fetch = PrefixFetch(self._core, request, reserved, peer)
            if (offer := await fetch.begin()) is not None:
                try:
                    yield pb.PrefillEvent(fetch=pb.Fetch(offer=offer))
                    await fetch.finish((await _receive(requests, FETCH_S, "Lent")).lent)
                finally:
                    fetch.abandon()
            await self._open(reserved.offer, peer)
            started = await self._next(Started)
            yield pb.PrefillEvent(
                started=pb.Started(
                    cached_tokens=started.cached_tokens,
                    fetched_tokens=fetch.tokens,
                    fetched_bytes=fetch.bytes,
                    fetch_failure=fetch.failure,
                )
            )
            done = await self._next(PrefillDone)
            yield pb.PrefillEvent(hand_off=self._hand_off(done, request.request_id))
            sealed = await self._next(SealedOut)
            self._sealed = True
            yield pb.PrefillEvent(sealed=pb.Sealed(seal=sealed.seal))
        finally:
            self._leave()

    def _check(self, start: pb.PrefillStart) -> ReplicaDescription:
        """The decode replica that calls, if both sides live the lives they believe in."""
        peer = self._core.caller(start.prefill_epoch, start.decode_replica, start.decode_epoch)
        check_model(self._core.me, start.request.model)
        return peer

    async def _open(self, offer: bytes, peer: ReplicaDescription) -> None:
        self._session = self._core.open_session(self._local_id, offer, peer)
        session = self._session
        await self._core.bridge.call(lambda engine: engine.open_session(self._local_id, session))

    async def _next(self, kind: type[E]) -> E:
        """The next happening of ``kind``; the others are kept for later, failures raised.

        A short transfer may be over before the engine tells of the step that computed it. The
        wait is bounded by the caller: decode cancels the call at the request's deadline.
        """
        early = next((item for item in self._early if isinstance(item, kind)), None)
        if early is not None:
            self._early.remove(early)
            return early
        while True:
            happening = await self._inbox.get()
            if isinstance(happening, kind):
                return happening
            if isinstance(happening, Delta):
                self._deltas.append(happening)
            elif isinstance(happening, EkidenError):
                raise happening
            elif isinstance(happening, Failed):
                raise ReplicaFailed(f"the transfer failed: {happening.reason}")
            else:
                self._early.append(happening)

    def _hand_off(self, done: PrefillDone, request_id: str) -> pb.HandOff:
        deltas = [msgspec.structs.replace(d, request_id=request_id) for d in self._deltas]
        return pb.HandOff(
            deltas=[delta_to_pb(delta) for delta in deltas],
            computed_tokens=done.computed_tokens,
            cached_tokens=done.cached_tokens,
        )

    def _leave(self) -> None:
        """Nothing more will be said; what is still being sent is stopped, then let go."""
        local_id = self._local_id
        if not self._sealed:
            self._core.bridge.post(lambda engine: engine.cancel(local_id))
            if self._session:
                self._core.fail_session(self._session, "decode ended the call")
        self._core.close_run(local_id)


async def _receive(
    requests: AsyncIterator[pb.PrefillRequest], within_s: float, what: str
) -> pb.PrefillRequest:
    try:
        async with asyncio.timeout(within_s):
            message = await anext(requests)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"decode sent no {what} within {within_s:g} s", state=what
        ) from error
    except StopAsyncIteration as error:
        raise BadRequest(f"decode ended the call where {what} was due") from error
    if message.WhichOneof("kind") != what.lower():
        raise BadRequest(f"decode sent {message.WhichOneof('kind')} where {what} was due")
    return message
