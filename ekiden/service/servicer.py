"""What every worker answers, whatever its role: the first meeting and the audit."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from ekiden.core.errors import EkidenError, NotFound, SetupError
from ekiden.core.types import BlockBooks, ReplicaStats
from ekiden.rpc import replica_pb2 as pb
from ekiden.rpc import replica_pb2_grpc
from ekiden.rpc.convert import from_pb, to_pb
from ekiden.rpc.server import abort_with
from ekiden.service.kv_reader import KvReader
from ekiden.service.replica import resident_bytes
from kv_transfer.compat import check_pair
from kv_transfer.description import ReplicaDescription

MAX_PEERS = 256
"""Peers remembered; the one met longest ago is forgotten first and meets again."""


class PeerTable:
    """Peers met, by replica id: only the latest life of each is believed."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, ReplicaDescription] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: ReplicaDescription) -> None:
        self._peers[peer.replica_id] = peer
        self._peers.move_to_end(peer.replica_id)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def get(self, replica_id: str, epoch: int) -> ReplicaDescription | None:
        """The peer of exactly this life, or None."""
        peer = self._peers.get(replica_id)
        return peer if peer is not None and peer.epoch == epoch else None


def check_meeting(me: ReplicaDescription, peer: ReplicaDescription) -> None:
    """Refuse a pair that cannot work.

    Raises:
        SetupError: one sentence with both values.
    """
    if {me.role, peer.role} != {"prefill", "decode"}:
        raise SetupError(
            f"{me.replica_id} is a {me.role} replica and {peer.replica_id} a {peer.role} one: KV "
            "goes from prefill to decode only"
        )
    prefill, decode = (me, peer) if me.role == "prefill" else (peer, me)
    check_pair(prefill, decode)


def check_model(me: ReplicaDescription, model: str) -> None:
    """Refuse a request for another model.

    Raises:
        NotFound: names both models.
    """
    if model != me.model:
        raise NotFound(
            f"model {model!r} is not served here: this replica serves {me.model!r}", field="model"
        )


class ReplicaServicer(replica_pb2_grpc.ReplicaServicer):
    """``Meet``, ``Audit`` and ``ReadKv``."""

    def __init__(
        self,
        me: ReplicaDescription,
        peers: PeerTable,
        audit: Callable[[], Awaitable[tuple[BlockBooks, ReplicaStats]]],
        states: Callable[[], list[str]],
        reader: KvReader | None,
    ) -> None:
        """``reader`` is None unless the operator lets peers read cached KV."""
        self._reader = reader
        self._states = states
        self._me = me
        self._peers = peers
        self._audit = audit

    async def Meet(
        self,
        request: pb.ReplicaDescription,
        context: grpc.aio.ServicerContext[pb.ReplicaDescription, pb.ReplicaDescription],
    ) -> pb.ReplicaDescription:
        try:
            peer = from_pb(request, ReplicaDescription)
            check_meeting(self._me, peer)
        except EkidenError as error:
            await abort_with(context, error)
        self._peers.add(peer)
        return to_pb(self._me, pb.ReplicaDescription)

    async def Audit(
        self, request: pb.AuditRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AuditReply:
        books, stats = await self._audit()
        return pb.AuditReply(
            total=books.total,
            free=books.free,
            cached=books.cached,
            held=books.held,
            requests=books.requests,
            sessions=books.sessions,
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            replica_id=self._me.replica_id,
            role=self._me.role,
            rss_bytes=resident_bytes(),
            stage_idle=stats.stage_idle,
            collective_share=stats.collective_share,
            states=Counter(self._states()),
        )

    async def ReadKv(
        self, request: pb.ReadKvRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.KvBlock]:
        if self._reader is None:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "cached KV is not shown: start the replica with --enable-kv-debug",
            )
        try:
            async for block in self._reader.read(tuple(request.tokens), request.salt):
                yield block
        except EkidenError as error:
            await abort_with(context, error)
