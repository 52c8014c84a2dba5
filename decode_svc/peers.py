"""The prefill replicas this decode replica has met, and those it had to refuse."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import grpc
import msgspec

from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.errors import EkidenError, ReplicaFailed, SetupError
from ekiden.core.types import KvWire, PrefillCandidate
from ekiden.rpc import prefill_pb2_grpc, replica_pb2, replica_pb2_grpc
from ekiden.rpc.channel import auth_metadata, open_channel
from ekiden.rpc.convert import from_pb, to_pb
from ekiden.service.servicer import check_meeting
from kv_transfer.description import ReplicaDescription

from .wires import Choice, Measured, NoWire

MAX_PEERS = 64
MEET_TIMEOUT_S = 3.0
CLOSE_GRACE_S = 600.0
RETRY_S = 30.0
"""A replica that was met and from which no KV came is not tried again before."""


class PrefillPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill replica that fits this one, for one life of it."""

    description: ReplicaDescription
    channel: grpc.aio.Channel
    stub: prefill_pb2_grpc.PrefillStub
    take: Measured
    """What its KV takes to here."""
    lend: Measured | None
    """What KV of here can take to it; None: nothing can, or it would not be the same there."""


Choose = Callable[[ReplicaDescription, prefill_pb2_grpc.PrefillStub], Awaitable[Choice]]


class PrefillPeers:
    """Meets each prefill replica once a life and remembers what came of it."""

    def __init__(
        self, me: ReplicaDescription, secret: str, choose: Choose, clock: Clock | None = None
    ) -> None:
        self._me = me
        self._choose = choose
        self._clock = clock or MonotonicClock()
        self._no_wire: dict[tuple[str, int], tuple[float, NoWire]] = {}
        """Lives from which no KV comes: until when that is believed, and what was said."""
        self.metadata = auth_metadata(secret)
        self._met: OrderedDict[tuple[str, int], PrefillPeer | SetupError] = OrderedDict()
        self._closing: set[asyncio.Future[None]] = set()
        self._meeting: dict[tuple[str, int], asyncio.Task[PrefillPeer]] = {}

    def __len__(self) -> int:
        return len(self._met)

    def wires(self) -> tuple[KvWire, ...]:
        """What KV takes from each of those that were met."""
        met = [known for known in self._met.values() if isinstance(known, PrefillPeer)]
        return tuple(
            KvWire(
                peer=peer.description.replica_id,
                wire=peer.take.wire,
                bytes_per_s=peer.take.bytes_per_s,
            )
            for peer in met
        )

    async def meet(self, candidate: PrefillCandidate) -> PrefillPeer:
        """The peer, met now if this is the first time.

        Raises:
            SetupError: the two do not fit; the sentence names both values.
            ReplicaFailed: it cannot be reached, or lives another life than the candidate says.
        """
        key = (candidate.address, candidate.epoch)
        known = self._met.get(key)
        if isinstance(known, SetupError):
            raise known
        until, failure = self._no_wire.get(key, (0.0, None))
        if failure is not None and self._clock.now() < until:
            raise failure
        if known is not None:
            self._met.move_to_end(key)
            return known
        if key not in self._meeting:
            task = asyncio.ensure_future(self._first_meeting(candidate))
            self._meeting[key] = task
            task.add_done_callback(lambda _: self._meeting.pop(key, None))
            task.add_done_callback(_seen)
        return await asyncio.shield(self._meeting[key])

    async def _first_meeting(self, candidate: PrefillCandidate) -> PrefillPeer:
        channel = open_channel(candidate.address)
        try:
            peer = await self._introduce(candidate, channel)
        except EkidenError as error:
            await channel.close(None)
            if isinstance(error, SetupError):
                self._remember(candidate, error)
            elif isinstance(error, NoWire):
                self._put_off(candidate, error)
            raise
        self._remember(candidate, peer)
        return peer

    async def _introduce(
        self, candidate: PrefillCandidate, channel: grpc.aio.Channel
    ) -> PrefillPeer:
        who = f"prefill replica {candidate.replica_id} at {candidate.address}"
        try:
            reply = await replica_pb2_grpc.ReplicaStub(channel).Meet(
                to_pb(self._me, replica_pb2.ReplicaDescription),
                timeout=MEET_TIMEOUT_S,
                metadata=self.metadata,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise SetupError(f"{who} refused: {error.details()}") from error
            raise ReplicaFailed(f"{who} cannot be met: {error.details()}") from error
        description = from_pb(reply, ReplicaDescription)
        if description.epoch != candidate.epoch:
            raise ReplicaFailed(f"{who} has restarted since it was chosen")
        check_meeting(self._me, description)
        stub = prefill_pb2_grpc.PrefillStub(channel)
        choice = await self._choose(description, stub)
        lend = choice.lend if description.kv.dtype == self._me.kv.dtype else None
        return PrefillPeer(
            description=description,
            channel=channel,
            stub=stub,
            take=choice.take,
            lend=lend,
        )

    def _put_off(self, candidate: PrefillCandidate, failure: NoWire) -> None:
        """Trying wires that do not work takes seconds: not every request should wait for it."""
        now = self._clock.now()
        alive = {k: kept for k, kept in self._no_wire.items() if kept[0] > now}
        self._no_wire = alive | {(candidate.address, candidate.epoch): (now + RETRY_S, failure)}

    def forget(self, peer: PrefillPeer) -> None:
        """It does not know us any more: meet it again when it is next asked."""
        for key in [key for key, known in self._met.items() if known is peer]:
            self._forget(key)

    def _remember(self, candidate: PrefillCandidate, outcome: PrefillPeer | SetupError) -> None:
        """Keep the outcome; forget earlier lives at this address and the longest unused."""
        for key in [key for key in self._met if key[0] == candidate.address]:
            self._forget(key)
        self._met[(candidate.address, candidate.epoch)] = outcome
        while len(self._met) > MAX_PEERS:
            self._forget(next(iter(self._met)))

    def _forget(self, key: tuple[str, int]) -> None:
        """Close the channel once the calls that are still on it have ended."""
        gone = self._met.pop(key)
        if isinstance(gone, PrefillPeer):
            closing = asyncio.ensure_future(gone.channel.close(CLOSE_GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for peer in self._met.values():
            if isinstance(peer, PrefillPeer):
                await peer.channel.close(None)
        self._met.clear()


def _seen(meeting: asyncio.Task[PrefillPeer]) -> None:
    """It may have failed when whoever asked for it had left: asyncio need not tell of that."""
    if not meeting.cancelled():
        meeting.exception()
