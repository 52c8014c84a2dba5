"""Which wire KV takes from a prefill replica: the fastest of those that both have, measured.

A measurement is a hand-off like any other but that nobody wants its KV: prefill sends whatever its
cache holds into blocks that are free here, and they are free again afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import msgspec

from ekiden.core.errors import EkidenError, ReplicaFailed
from ekiden.core.ids import new_request_id
from ekiden.engine.engine import Reservation
from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc import prefill_pb2_grpc
from ekiden.service.bridge import or_drop
from ekiden.service.outcome import Outcome
from kv_transfer.compat import common_wires
from kv_transfer.description import MAPPED_WIRES, ReplicaDescription
from kv_transfer.session import Arrived, Failed

if TYPE_CHECKING:
    from .core import DecodeCore

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""For one measurement."""
PROBE_BYTES = (64 << 10, 1 << 20, 8 << 20, 32 << 20)
"""One after the other: the first makes the connections, the last is the largest."""
LONG_ENOUGH_S = 0.02
"""A measurement that took so long is not followed by a larger one."""
CLEARLY_FASTER = 1.1
"""What a wire must be faster by to be taken before one that is better by nature."""


class Measured(msgspec.Struct, frozen=True):
    """A wire and what it did; ``bytes_per_s`` is 0 if there was no room to measure."""

    wire: str
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        if not self.bytes_per_s:
            return f"{self.wire} (not measured)"
        if self.bytes_per_s < 1e8:
            return f"{self.wire} {self.bytes_per_s / 1e6:.1f} MB/s"
        return f"{self.wire} {self.bytes_per_s / 1e9:.2f} GB/s"


class NoWire(ReplicaFailed):
    """The other replica answers, but KV does not come from it."""


class Choice(NamedTuple):
    """``take``: for KV that comes; ``lend``: for what goes back, None if nothing can."""

    take: Measured
    lend: Measured | None


class WireChooser:
    """Measures on behalf of one decode replica."""

    def __init__(self, core: DecodeCore) -> None:
        self._core = core

    async def choose(self, peer: ReplicaDescription, stub: prefill_pb2_grpc.PrefillStub) -> Choice:
        """The wire to take from ``peer``; says which, and why, in the log.

        Raises:
            SetupError: the two have none in common.
            NoWire: none of those that they have works.
        """
        works: list[Measured] = []
        failures: list[str] = []
        for wire in common_wires(peer, self._core.me):
            try:
                works.append(await self._measure(peer, stub, wire))
            except ReplicaFailed as failure:
                failures.append(f"{wire}: {failure.message}")
        if not works:
            raise NoWire(f"no KV wire to {peer.replica_id} works: {'; '.join(failures)}")
        best = fastest(works)
        _tell(peer.replica_id, best, [found for found in works if found is not best], failures)
        # A mapped wire has one direction: decode's pool is not shared.
        other_way = [found for found in works if found.wire not in MAPPED_WIRES]
        return Choice(best, fastest(other_way) if other_way else None)

    async def _measure(
        self, peer: ReplicaDescription, stub: prefill_pb2_grpc.PrefillStub, wire: str
    ) -> Measured:
        """Raises ReplicaFailed: nothing comes over this wire."""
        best = 0.0
        for size in PROBE_BYTES:
            tokens = max(size // peer.kv.token_bytes(), 1)
            found = await self._probe(peer, stub, wire, tokens)
            if not found.seconds:
                break
            best = max(best, found.bytes / found.seconds)
            if found.seconds > LONG_ENOUGH_S:
                break
        return Measured(wire, best)

    async def _probe(
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


def _tell(replica_id: str, best: Measured, others: list[Measured], failures: list[str]) -> None:
    also = f"; also works: {', '.join(map(str, others))}" if others else ""
    logger.info("KV from %s takes %s%s", replica_id, best, also)
    if failures:
        level = logging.INFO if best.wire in MAPPED_WIRES else logging.WARNING
        logger.log(level, "KV wires from %s that do not work: %s", replica_id, "; ".join(failures))


def fastest(works: list[Measured]) -> Measured:
    """The fastest; one that comes earlier, and is better by nature, is only passed over for a clear
    gain, since a measurement of milliseconds is not exact."""
    best = works[0]
    for other in works[1:]:
        if other.bytes_per_s > best.bytes_per_s * CLEARLY_FASTER:
            best = other
    return best
