"""A prefix that prefill lacks and decode holds is fetched, where that is faster than computing it.

In the second turn of a chat decode holds the first answer, and prefill only the first prompt. What
is fetched enters prefill's prefix cache; the request then finds it there like any other prefix. A
fetch that fails costs its time, is told of, and the prefix is computed.
"""

from __future__ import annotations

import asyncio

import msgspec

from ekiden.core.errors import EkidenError, ReplicaFailed
from ekiden.core.types import Request
from ekiden.engine.engine import Reservation
from ekiden.rpc import prefill_pb2 as pb
from ekiden.service.bridge import or_drop
from ekiden.service.outcome import Outcome
from kv_transfer.description import ReplicaDescription
from kv_transfer.session import Arrived, Failed

from .core import PrefillCore

FETCH_S = 10.0
"""A fetch that is not through by then is given up."""
OVERHEAD_S = 0.01
"""Of the conversation about a fetch, beside its bytes."""
CLEARLY_FASTER = 1.5
"""What fetching must be faster by, since both times are predictions."""


class PrefixFetch:
    """One fetch, or none if it would not pay. Afterwards ``tokens`` and ``bytes`` say what came."""

    key = 0

    def __init__(
        self,
        core: PrefillCore,
        request: Request,
        reserved: pb.Reserved,
        peer: ReplicaDescription,
    ) -> None:
        self.tokens = self.bytes = 0
        self.failure = ""
        self._core = core
        self._peer = peer
        self._wire, self._rate = reserved.lend_wire, reserved.lend_bytes_per_s
        size = core.me.kv.block_size
        # The last token of a prompt is always computed, for its logits.
        known = min(reserved.held_tokens, len(request.prompt) - 1) // size * size
        self._prefix = request.prompt[:known]
        self._request = request
        self._start = 0
        self._blocks: tuple[int, ...] = ()
        self._session = 0
        self._arrival = Outcome[Arrived]()

    async def begin(self) -> bytes | None:
        """The offer to make to decode; None: everything is here, or computing is faster."""
        if not self._wire or not self._rate:
            return None
        prefix = msgspec.structs.replace(self._request, prompt=(*self._prefix, 0))
        cached = await self._core.bridge.call(lambda engine: engine.cached_prefix(prefix))
        if not self._pays(len(self._prefix) - cached):
            return None
        salt = self._request.salt
        asking = self._core.bridge.call(lambda engine: engine.hold_prefix(self._prefix, salt))
        held = await or_drop(asking, self._let_go)
        if held is None:
            return None
        self.key, self._start, self._blocks = held.key, held.held_tokens, held.blocks
        try:
            self._session, offer = self._core.open_fetch(
                self, self._peer, self._start, len(self._prefix), self._blocks, self._wire
            )
        except EkidenError as error:
            self._let_go(held)
            self.failure = error.message
            return None
        return offer

    def _let_go(self, held: Reservation | None) -> None:
        if held is not None:
            self._core.bridge.post(lambda engine: engine.writer_done(held.key))

    def _pays(self, missing: int) -> bool:
        speed = self._core.replica.stats().prefill_tokens_per_s
        if missing <= 0 or not speed:
            return False
        fetch_s = OVERHEAD_S + missing * self._core.me.kv.token_bytes() / self._rate
        return missing / speed > fetch_s * CLEARLY_FASTER

    async def finish(self, lent: pb.Lent) -> None:
        """Take what decode has sent; whatever goes wrong only means that it is computed."""
        try:
            if not lent.seal:
                raise ReplicaFailed(lent.refusal)
            self._core.seal_fetch(self._session, lent.seal)
            async with asyncio.timeout(FETCH_S):
                arrived = await self._arrival.future
        except TimeoutError:
            self.failure = f"the prefix did not come within {FETCH_S:g} s"
        except EkidenError as error:
            self.failure = error.message
        else:
            self.tokens, self.bytes = len(self._prefix) - self._start, arrived.bytes

    def abandon(self) -> None:
        """Stop the writer if it still writes."""
        if self._arrival.abandon():
            self._core.fail_session(self._session, "the fetch was given up")

    def on_arrived(self, event: Arrived) -> None:
        """Every byte is there: requests may find it from now on. Comes before the blocks are let
        go."""
        prefix, salt, blocks = self._prefix, self._request.salt, self._blocks
        self._core.bridge.post(lambda engine: engine.publish_prefix(prefix, salt, blocks))
        self._arrival.good(event)

    def on_failed(self, event: Failed) -> None:
        self._arrival.bad(ReplicaFailed(event.reason))
