"""One measurement of a wire: a hand-off like any other but that nobody wants its KV.

Prefill sends whatever its cache holds into blocks that are free here, and they are free again
afterwards.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from ekiden.core.errors import EkidenError, ReplicaFailed
from ekiden.core.ids import new_request_id
from ekiden.engine.engine import Reservation
from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc import prefill_pb2_grpc
from ekiden.service.bridge import or_drop
from ekiden.service.outcome import Outcome
from kv_transfer.description import ReplicaDescription
from kv_transfer.session import Arrived, Failed

if TYPE_CHECKING:
    from .core import DecodeCore

PROBE_S = 5.0
"""For one measurement."""


class Prober:
    """Measures on behalf of one decode replica."""

    def __init__(self, core: DecodeCore) -> None:
        self._core = core

    async def probe(
        self, peer: ReplicaDescription, stub: prefill_pb2_grpc.PrefillStub, wire: str, tokens: int
    ) -> Arrived:
        """Have about ``tokens`` positions sent. Raises ReplicaFailed: they did not come."""
        scratch = await self._scratch(min(tokens, peer.max_model_len))
        held = len(scratch.blocks) * self._core.me.kv.block_size
        probe = _Probe(self._core, peer)
        try:
            async with asyncio.timeout(PROBE_S):
                return await probe.run(stub, scratch, min(held, peer.max_model_len), wire)
        except TimeoutError as error:
            raise ReplicaFailed(f"nothing came within {PROBE_S:g} s") from error
        finally:
            probe.abandon()

    async def _scratch(self, tokens: int) -> Reservation:
        """Blocks to throw away what comes; waits for one where requests hold them all.

        Raises:
            ReplicaFailed: none was given back in time. A wire that nobody has tried is not taken.
        """
        try:
            async with asyncio.timeout(PROBE_S):
                while True:
                    freed = self._core.freed
                    asking = self._core.bridge.call(lambda engine: engine.hold_free(tokens))
                    held = await or_drop(asking, lambda late: self._core.let_go(late.key))
                    if held.blocks:
                        return held
                    self._core.let_go(held.key)
                    await freed.wait()
        except TimeoutError as error:
            raise ReplicaFailed(f"no block was free to try it within {PROBE_S:g} s") from error


class _Probe:
    """One measurement under way."""

    def __init__(self, core: DecodeCore, peer: ReplicaDescription) -> None:
        self._core = core
        self._peer = peer
        self._session = 0
        self._arrival = Outcome[Arrived]()

    async def run(
        self,
        stub: prefill_pb2_grpc.PrefillStub,
        scratch: Reservation,
        tokens: int,
        wire: str,
    ) -> Arrived:
        try:
            self._session, offer = self._core.open_session(
                self, new_request_id(), self._peer, 0, tokens, scratch, wire
            )
        except EkidenError as error:
            self._core.let_go(scratch.key)
            raise ReplicaFailed(error.message) from error
        request = pb.ProbeRequest(
            decode_replica=self._core.me.replica_id,
            decode_epoch=self._core.me.epoch,
            prefill_epoch=self._peer.epoch,
            offer=offer,
        )
        await self._call(stub, request)
        return await self._arrival.future

    async def _call(self, stub: prefill_pb2_grpc.PrefillStub, request: pb.ProbeRequest) -> None:
        """Ask for the bytes and take the seal; a session that fails meanwhile ends it."""
        call = stub.Probe(request, metadata=self._core.peers.metadata)
        asking = asyncio.ensure_future(_sealed(call))
        try:
            waits: set[asyncio.Future[Any]] = {asking, self._arrival.future}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._arrival.future.done() and not asking.done():
                self._arrival.future.result()
            self._core.seal_session(self._session, await asking)
        except grpc.aio.AioRpcError as error:
            raise ReplicaFailed(f"it cannot send: {error.details()}") from error
        finally:
            call.cancel()
            asking.cancel()

    def abandon(self) -> None:
        if self._arrival.abandon() and self._session:
            self._core.fail_session(self._session, "measuring was given up")

    def on_arrived(self, event: Arrived) -> None:
        self._arrival.good(event)

    def on_failed(self, event: Failed) -> None:
        self._arrival.bad(ReplicaFailed(event.reason))


async def _sealed(call: grpc.aio.UnaryUnaryCall[pb.ProbeRequest, pb.Sealed]) -> bytes:
    return (await call).seal
