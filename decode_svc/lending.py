"""Decode lends prefill a part of a prefix that is cached here: a hand-off the other way."""

from __future__ import annotations

import asyncio

from ekiden.core.errors import EkidenError, ReplicaFailed
from ekiden.core.types import Request
from ekiden.rpc import prefill_pb2 as pb
from ekiden.service.bridge import or_drop
from ekiden.service.outcome import Outcome
from kv_transfer.description import ReplicaDescription
from kv_transfer.session import Failed, SealedOut

from .core import DecodeCore

LEND_S = 8.0
"""Shorter than what prefill waits for, so that it hears why."""


class Lending:
    """One prefix lent. ``run`` never fails: a refusal has a reason, and prefill computes."""

    def __init__(self, core: DecodeCore, request: Request, peer: ReplicaDescription) -> None:
        self._core = core
        self._request = request
        self._peer = peer
        self._session = 0
        self._sealed = Outcome[SealedOut]()

    async def run(self, offer: bytes, held_tokens: int) -> pb.Lent:
        """Send what ``offer`` asks for of the first ``held_tokens`` of the prompt."""
        try:
            async with asyncio.timeout(LEND_S):
                return pb.Lent(seal=await self._send(offer, held_tokens))
        except TimeoutError:
            return pb.Lent(refusal=f"decode could not send the prefix within {LEND_S:g} s")
        except EkidenError as error:
            return pb.Lent(refusal=error.message)
        finally:
            self._abandon()

    async def _send(self, offer: bytes, held_tokens: int) -> bytes:
        prefix, salt = self._request.prompt[:held_tokens], self._request.salt
        asking = self._core.bridge.call(lambda engine: engine.hold_cached(prefix, salt))
        held = await or_drop(asking, lambda held: self._core.let_go(held.key))
        try:
            self._session = self._core.open_lending(self, offer, self._peer, held)
        except EkidenError:
            self._core.let_go(held.key)
            raise
        return (await self._sealed.future).seal

    def _abandon(self) -> None:
        if self._sealed.abandon() and self._session:
            self._core.fail_session(self._session, "lending was given up")

    def on_sealed(self, event: SealedOut) -> None:
        self._sealed.good(event)

    def on_failed(self, event: Failed) -> None:
        self._sealed.bad(ReplicaFailed(event.reason))
