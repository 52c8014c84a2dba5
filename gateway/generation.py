"""One request at the decode replicas, from placement to its account.

1. ``Fleet.place`` picks a decode replica and prefill candidates; the request goes down its link.
2. ``take`` returns what came up. Until the first token, a replica that fails is replaced.
3. ``close`` in every case: cancels what still runs, releases what was booked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from ekiden.core.clock import Clock
from ekiden.core.errors import DeadlineExceeded, EkidenError, ReplicaFailed, Unavailable
from ekiden.core.types import Completion, Delta, Fallback, FinishReason, Request
from gateway.catalog import ServedModel
from gateway.decode_link import Event, Inbox
from gateway.fleet import Fleet, Placement, prompt_granules
from gateway.placing import MAX_ATTEMPTS
from gateway.prefix_guess import Life
from gateway.routing import Ask

_MARGIN_S = 5.0
"""The replica ends a request at its deadline; the gateway waits a little longer to be told."""


class Generation:
    """Raises EkidenError from ``take`` when the request fails; nothing follows then."""

    def __init__(self, fleet: Fleet, model: ServedModel, request: Request, clock: Clock) -> None:
        """Place and submit.

        Raises:
            Unavailable: no replica can serve it.
        """
        self._fleet, self._model, self._clock = fleet, model, clock
        self._request = request
        self._granules = prompt_granules(model.name, request.prompt)
        self._deadline = clock.now() + request.deadline_s + _MARGIN_S
        self._failed: set[Life] = set()
        self._fallbacks: list[Fallback] = []
        self._pending: EkidenError | None = None
        self._started = False
        self.completion: Completion | None = None
        self.predicted_cached = 0
        self._placement, self._inbox = self._place()
        # One timer for all that is waited for: one for each wait took a tenth of a token's time.
        limit_s = self._deadline - clock.now()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._late)

    async def take(self) -> list[Delta]:
        """New deltas, at least one or the completion. Call until ``completion`` is set."""
        while True:
            if self._pending is not None:
                self._blame(self._pending)
                raise self._pending
            deltas = self._note(await self._inbox.take())
            if deltas or self.completion is not None:
                return deltas
            if self._pending is not None:
                self._replace(self._pending)

    def close(self) -> None:
        """Cancel what still runs and release what was booked. Safe to call twice."""
        self._timer.cancel()
        self._release()

    def _release(self) -> None:
        self._placement.link.cancel(self._request.request_id)
        self._fleet.finish(self._placement, self.completion)

    def _late(self) -> None:
        replica_id = self._placement.life[0]
        self._inbox.put(
            DeadlineExceeded(
                f"decode replica {replica_id} did not end the request within "
                f"{self._request.deadline_s:g} s",
                state="decode",
                peer=replica_id,
            )
        )

    def _note(self, events: Sequence[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if isinstance(event, Delta):
                deltas.append(event)
                if event.finish is FinishReason.ERROR or event.finish is FinishReason.CANCELLED:
                    self._pending = self._cut_short(event)
            elif isinstance(event, Completion):
                fallbacks = (*self._fallbacks, *event.fallbacks)
                self.completion = msgspec.structs.replace(event, fallbacks=fallbacks)
            else:
                self._pending = event
        if deltas and not self._started:
            self._started = True
            self._fleet.first_token(self._placement)
        return deltas

    def _cut_short(self, delta: Delta) -> ReplicaFailed:
        return ReplicaFailed(
            f"decode replica {self._placement.life[0]} ended choice {delta.choice}: {delta.finish}"
        )

    def _replace(self, error: EkidenError) -> None:
        """Try another replica; nothing was shown yet, so nothing can be shown twice."""
        life = self._placement.life
        at_fault = self._blame(error)
        if not at_fault or self._started or len(self._failed) + 1 >= MAX_ATTEMPTS:
            raise error
        self._release()
        self._failed.add(life)
        try:
            self._placement, self._inbox = self._place()
        except Unavailable:
            raise error from None
        self._pending = None
        self._fallbacks.append(Fallback(kind="decode_retry", reason=f"{life[0]}: {error.message}"))

    def _blame(self, error: EkidenError) -> bool:
        """Whether the replica, and not the request, is the cause; it is remembered then."""
        at_fault = isinstance(error, ReplicaFailed | Unavailable) or error.status == 500
        if at_fault:
            self._fleet.failed(self._placement, certain=isinstance(error, ReplicaFailed))
        return at_fault

    def _place(self) -> tuple[Placement, Inbox]:
        sampling = self._request.sampling
        ask = Ask(
            prompt=len(self._request.prompt), max_output=sampling.max_tokens, choices=sampling.n
        )
        placement = self._fleet.place(self._model, self._granules, ask, without=self._failed)
        self.predicted_cached = placement.predicted_cached
        try:
            left = self._deadline - _MARGIN_S - self._clock.now()
            request = msgspec.structs.replace(self._request, deadline_s=max(left, 0.001))
            return placement, placement.link.submit(request, placement.prefill)
        except Unavailable:
            self._fleet.finish(placement, None)
            raise
