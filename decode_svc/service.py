"""``Decode.Serve`` for gateways, ``Decode.Generate`` for everybody: both start a ``Life``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import msgspec

from ekiden.core.errors import BadRequest, EkidenError, Overloaded, Unavailable
from ekiden.core.ids import new_request_id, new_seed
from ekiden.core.types import PrefillCandidate, Request
from ekiden.registry.watcher import Watcher
from ekiden.rpc import common_pb2, decode_pb2_grpc
from ekiden.rpc import decode_pb2 as pb
from ekiden.rpc.convert import candidate_from_pb, request_from_pb
from ekiden.rpc.server import RpcServer, abort_with
from ekiden.service.replica import Replica
from ekiden.service.servicer import check_model

from .core import DecodeCore
from .greeter import Greeter, prefill_candidates
from .life import Life
from .sinks import GenerateSink, ServeSink, Sink

MAX_REQUESTS = 4096
"""Requests one replica holds, running and waiting; one more is refused at once."""


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """The servicer, and the lives of the requests that came through it."""

    services: Sequence[str] = ("ekiden.rpc.Decode", "ekiden.rpc.Replica")

    def __init__(self, replica: Replica, on_fatal: Callable[[BaseException], None]) -> None:
        self.core = DecodeCore(replica, on_fatal)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._draining = False
        url = replica.config.redis_url
        self._watcher = Watcher(url) if url else None
        self._greeter = Greeter(self.core, self._watcher) if self._watcher else None

    def register(self, server: RpcServer) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server.raw)
        self.core.register(server)

    async def Serve(
        self,
        request_iterator: AsyncIterator[pb.ServeRequest],
        context: grpc.aio.ServicerContext[pb.ServeRequest, pb.ServeEvent],
    ) -> AsyncIterator[pb.ServeEvent]:
        """One gateway's stream. Its end cancels everything that was submitted on it."""
        sink = ServeSink()
        mine: set[str] = set()
        reader = asyncio.ensure_future(self._read(request_iterator, sink, mine))
        try:
            while True:
                yield await sink.next()
        except EkidenError as error:
            await abort_with(context, error)
        finally:
            reader.cancel()
            for request_id in mine:
                self._cancel(request_id)

    async def _read(
        self, requests: AsyncIterator[pb.ServeRequest], sink: ServeSink, mine: set[str]
    ) -> None:
        async for message in requests:
            if message.WhichOneof("kind") == "cancel":
                if message.cancel.request_id in mine:  # never what another stream submitted
                    self._cancel(message.cancel.request_id)
                continue
            request = request_from_pb(message.submit.request)
            candidates = [candidate_from_pb(item) for item in message.submit.prefill]
            try:
                task = self._submit(request, candidates, sink)
            except EkidenError as error:
                sink.error(request.request_id, error)
                sink.flush()
                continue
            mine.add(request.request_id)
            task.add_done_callback(partial(_discard, mine, request.request_id))

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent],
    ) -> AsyncIterator[pb.GenerateEvent]:
        """One request, one stream. Cancelling the call cancels the request."""
        sink = GenerateSink()
        task = None
        try:
            parsed = _completed(request.request, self.core.me.model)
            task = self._submit(parsed, await self._candidates(request), sink)
            while True:
                event = await sink.next()
                yield event
                if event.WhichOneof("kind") == "completion":
                    return
        except EkidenError as error:
            await abort_with(context, error)
        finally:
            if task is not None:
                task.cancel()

    async def _candidates(self, request: pb.GenerateRequest) -> list[PrefillCandidate]:
        """Those the caller names, else every live prefill replica of this model."""
        if request.local_prefill:
            return []
        if request.prefill or self._watcher is None:
            return [candidate_from_pb(item) for item in request.prefill]
        await self._watcher.start()
        return prefill_candidates(self._watcher.replicas(), self.core.me.model)

    def _submit(
        self, request: Request, candidates: Sequence[PrefillCandidate], sink: Sink
    ) -> asyncio.Task[None]:
        """Start the life of a request.

        Raises:
            EkidenError: it is refused before any work.
        """
        self._check(request)
        life = Life(self.core, request, candidates, sink)
        task = asyncio.ensure_future(life.run())
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.request_id, None))
        return task

    def _check(self, request: Request) -> None:
        if self._draining:
            raise Unavailable(f"decode replica {self.core.me.replica_id} is draining")
        check_model(self.core.me, request.model)
        if not request.deadline_s > 0:  # NaN is not either, and would disorder the loop's timers
            raise BadRequest(
                f"deadline_s is {request.deadline_s}: it must be more than 0", field="deadline_s"
            )
        if request.request_id in self._tasks:
            raise BadRequest(
                f"request_id {request.request_id!r} is already running here", field="request_id"
            )
        if len(self._tasks) >= MAX_REQUESTS:
            raise Overloaded(f"decode replica holds {MAX_REQUESTS} requests already")

    def _cancel(self, request_id: str) -> None:
        if task := self._tasks.get(request_id):
            task.cancel()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests and wait for those held."""
        self._draining = True
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace_s)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._watcher is not None and self._greeter is not None:
            await self._greeter.close()
            await self._watcher.close()
        await self.core.close()


def _discard(ids: set[str], request_id: str, _task: object) -> None:
    ids.discard(request_id)


def _completed(message: common_pb2.Request, model: str) -> Request:
    """A public call may leave out its id, seed and model."""
    request = request_from_pb(message)
    changes: dict[str, Any] = {}
    if not request.request_id:
        changes["request_id"] = new_request_id()
    if not request.model:
        changes["model"] = model
    if not message.sampling.HasField("seed"):
        changes["sampling"] = msgspec.structs.replace(request.sampling, seed=new_seed())
    return msgspec.structs.replace(request, **changes)
