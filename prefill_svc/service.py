"""``Prefill.Run``: one call a request, each a ``PrefillRun``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from ekiden.core.errors import EkidenError, Overloaded, Unavailable
from ekiden.rpc import prefill_pb2 as pb
from ekiden.rpc import prefill_pb2_grpc
from ekiden.rpc.convert import error_to_pb
from ekiden.rpc.server import RpcServer, abort_with
from ekiden.service.replica import Replica

from .core import PrefillCore
from .probe import probe
from .run import PrefillRun

MAX_RUNS = 4096
"""Requests one replica holds, queued and running; one more is refused at once."""

DRAIN_LOOK_S = 0.05


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """The servicer of a prefill replica."""

    services: Sequence[str] = ("ekiden.rpc.Prefill", "ekiden.rpc.Replica")

    def __init__(self, replica: Replica, on_fatal: Callable[[BaseException], None]) -> None:
        self.core = PrefillCore(replica, on_fatal)
        self._draining = False
        self._runs = 0

    def register(self, server: RpcServer) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server.raw)
        self.core.register(server)

    async def Run(
        self,
        request_iterator: AsyncIterator[pb.PrefillRequest],
        context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent],
    ) -> AsyncIterator[pb.PrefillEvent]:
        """One hand-off. Failures come as a last ``failed`` event with their class."""
        self._runs += 1
        events = PrefillRun(self.core).events(request_iterator)
        try:
            self._admit()
            async for event in events:
                yield event
        except EkidenError as error:
            yield pb.PrefillEvent(failed=error_to_pb("", error))
        finally:
            self._runs -= 1
            await events.aclose()

    async def Probe(
        self,
        request: pb.ProbeRequest,
        context: grpc.aio.ServicerContext[pb.ProbeRequest, pb.Sealed],
    ) -> pb.Sealed:
        """Send bytes for decode to time. Answers when all of them are with the wire."""
        try:
            self._admit()
            return await probe(self.core, request)
        except EkidenError as error:
            await abort_with(context, error)

    def _admit(self) -> None:
        if self._draining:
            raise Unavailable(f"prefill replica {self.core.me.replica_id} is draining")
        if self._runs > MAX_RUNS:
            raise Overloaded(f"prefill replica holds {MAX_RUNS} requests already")

    async def drain(self, grace_s: float) -> None:
        """Refuse new runs; keep serving KV until what is held has been fetched."""
        self._draining = True
        deadline = self.core.clock.now() + grace_s
        while (self._runs or self.core.busy) and self.core.clock.now() < deadline:
            await asyncio.sleep(DRAIN_LOOK_S)

    async def close(self) -> None:
        await self.core.close()
