"""The life of one request on a decode replica.

    1. look the prefix cache up; a short rest is prefilled here
    2. else ask the prefill candidates in order, each in one ``Handoff``
    3. none worked: prefill here, and say why
    4. the hand-off token was seen but its KV never came: recompute from what the client has seen
    5. tokens flow to the caller as the engine emits them
    6. the account: where every prompt token came from, why, and where the time went

Whatever happens, the caller gets exactly one completion or one error, unless it has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ekiden.core.errors import (
    DeadlineExceeded,
    EkidenError,
    InvariantBroken,
    ReplicaFailed,
    SetupError,
)
from ekiden.core.types import (
    Completion,
    Delta,
    Fallback,
    PrefillCandidate,
    Request,
    TokenSources,
    TransferStats,
)
from ekiden.engine.engine import EngineEvent, RequestFinished, Started

from .core import DecodeCore
from .handoff import AttemptFailed, Handoff
from .sinks import Sink
from .timeline import Timeline

logger = logging.getLogger(__name__)


class Life:
    """One request, from submission to its last message."""

    def __init__(
        self,
        core: DecodeCore,
        request: Request,
        candidates: Sequence[PrefillCandidate],
        sink: Sink,
    ) -> None:
        self.core = core
        self.request = request
        self.candidates = candidates
        self.sink = sink
        self.timeline = Timeline(core.clock)
        self._fallbacks: list[Fallback] = []
        self._local_reason = ""
        self._handoff: Handoff | None = None
        self._told = False
        self._finished: asyncio.Future[RequestFinished] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Live it. Never raises, except CancelledError when the caller has left."""
        request_id = self.request.request_id
        self.core.lives[request_id] = self
        try:
            async with asyncio.timeout(self.request.deadline_s):
                await self._prefill()
                await asyncio.shield(self._finished)
        except TimeoutError:
            self._fail(self._late())
        except EkidenError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("%s broke", request_id)
            self._fail(InvariantBroken(f"decode failed on {request_id}: {error!r}"))
        finally:
            del self.core.lives[request_id]
            self.core.bridge.post(lambda engine: engine.cancel(request_id))
            self._finished.cancel()

    def _late(self) -> DeadlineExceeded:
        state = self.state
        return DeadlineExceeded(
            f"request {self.request.request_id} passed its deadline of "
            f"{self.request.deadline_s:g} s while {state}",
            state=state,
        )

    @property
    def state(self) -> str:
        """What the request waits for, in words."""
        if self._handoff is not None and not self.timeline.has_kv:
            return self._handoff.state
        return "decoding" if self.timeline.ttft_s is not None else "waiting for its first token"

    def _fail(self, error: EkidenError) -> None:
        """Tell the caller, unless it has been told how the request ended."""
        if self._told:
            return
        logger.warning("%s failed: %s", self.request.request_id, error.message)
        self.sink.error(self.request.request_id, error)
        self.sink.flush()

    async def _prefill(self) -> None:
        """Get the prompt's KV and the first tokens, one way or another."""
        await self.core.bridge.call(lambda engine: engine.check(self.request))
        reason = await self._why_local()
        if reason is None:
            for candidate in self.candidates:
                if await self._attempt(candidate):
                    return
            reason = "local: " + self._fallbacks[-1].reason
            self._fall_back("local_prefill", "every prefill candidate failed")
        self._local_reason = reason
        await self.core.bridge.call(lambda engine: engine.add(self.request))

    async def _why_local(self) -> str | None:
        """Why this prompt is prefilled here from the start, or None if it is not."""
        if not self.candidates:
            return "local: no prefill replica was offered"
        cached = await self.core.bridge.call(lambda engine: engine.cached_prefix(self.request))
        rest, limit = (
            len(self.request.prompt) - cached,
            self.core.replica.config.local_prefill_tokens,
        )
        if rest <= limit:
            return f"local: {rest} uncached tokens, up to {limit} are prefilled on decode"
        return None

    async def _attempt(self, candidate: PrefillCandidate) -> bool:
        """Whether this candidate (or a recompute after its hand-off token) served the prompt."""
        try:
            peer = await self.core.peers.meet(candidate)
            self._handoff = Handoff(self.core, self.request, peer, self.timeline)
            await self._handoff.run()
        except AttemptFailed as failure:
            return await self._after_failure(failure)
        except SetupError as refusal:
            self._fall_back("refused", refusal.message)
            return False
        except ReplicaFailed as failure:
            return await self._after_failure(AttemptFailed(failure.message))
        if self._handoff.fetch_failure:
            self._fall_back("prefix_fetch", self._handoff.fetch_failure)
        self.timeline.kv_ready()
        return True

    async def _after_failure(self, failure: AttemptFailed) -> bool:
        request_id = self.request.request_id
        if not failure.binding:
            self._fall_back("prefill_retry", failure.message)
            await self.core.bridge.call(lambda engine: engine.unreserve(request_id))
            self._handoff = None
            return False
        if not self._finished.done():
            self._fall_back("recompute", failure.message)
            self.timeline.kv_ready()
            self._local_reason = f"local: recomputed after {failure.message}"
            await self.core.bridge.call(lambda engine: engine.recompute(request_id))
        return True

    def _fall_back(self, kind: str, reason: str) -> None:
        logger.warning("%s: %s: %s", self.request.request_id, kind, reason)
        self._fallbacks.append(Fallback(kind=kind, reason=reason))

    def on_event(self, event: EngineEvent) -> None:
        """What the engine says besides tokens."""
        if isinstance(event, Started):
            self.timeline.prefill_started()

    def on_delta(self, delta: Delta) -> None:
        """New tokens: mark the time, pass them on."""
        self.timeline.tokens()
        self.sink.delta(delta)

    def on_finished(self, finished: RequestFinished) -> None:
        """The last choice has ended: the account follows its last delta at once."""
        if self._finished.done():
            return
        if finished.preemptions:
            self._fall_back("preempted", f"{finished.preemptions} times, for want of KV blocks")
        self.sink.completion(self._account(finished))
        self._told = True
        self._finished.set_result(finished)

    def on_fatal(self, error: EkidenError) -> None:
        """The engine is gone, and this request with it."""
        if not self._finished.done():
            self._finished.set_exception(error)
            self._finished.exception()

    def _account(self, finished: RequestFinished) -> Completion:
        handoff = self._handoff
        return Completion(
            request_id=self.request.request_id,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=finished.completion_tokens,
            sources=self._sources(finished),
            times=self.timeline.split(),
            transfer=handoff.transfer if handoff else TransferStats(),
            fallbacks=tuple(self._fallbacks),
            prefill_replica=handoff.peer.description.replica_id if handoff else "",
            decode_replica=self.core.me.replica_id,
        )

    def _sources(self, finished: RequestFinished) -> TokenSources:
        if not self._local_reason and self._handoff is not None:
            return self._handoff.sources
        prompt = len(self.request.prompt)
        cached = min(finished.cached_tokens, prompt)
        return TokenSources(
            decode_cache=cached, local_computed=prompt - cached, reason=self._local_reason
        )
