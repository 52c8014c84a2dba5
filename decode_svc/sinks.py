"""Where a request's tokens go: one interface, two kinds of callers.

``ServeSink`` collects what all requests of one gateway produced in a step into one message;
``GenerateSink`` serves one public call. Both have a bound: a reader who does not read is cut off.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ekiden.core.errors import EkidenError, Overloaded
from ekiden.core.types import Completion, Delta
from ekiden.rpc import decode_pb2 as pb
from ekiden.rpc.convert import completion_to_pb, delta_to_pb, error_to_pb, write_delta

MAX_PENDING = 100_000
"""Deltas waiting for a reader; about a minute of a full batch."""


class Sink(Protocol):
    """Receives one or many requests' output, on the event loop, in order."""

    def delta(self, delta: Delta) -> None: ...

    def completion(self, completion: Completion) -> None: ...

    def error(self, request_id: str, error: EkidenError) -> None: ...

    def flush(self) -> None:
        """The step's output is complete: send it."""


class ServeSink:
    """One gateway's stream: everything pending goes out in one message."""

    def __init__(self) -> None:
        self._pending = pb.ServeEvent()
        self._wake = asyncio.Event()
        self.overflowed = False

    def delta(self, delta: Delta) -> None:
        if len(self._pending.deltas) >= MAX_PENDING:
            self.overflowed = True
            self._wake.set()
            return
        write_delta(delta, self._pending.deltas.add())

    def completion(self, completion: Completion) -> None:
        self._pending.completions.append(completion_to_pb(completion))

    def error(self, request_id: str, error: EkidenError) -> None:
        self._pending.errors.append(error_to_pb(request_id, error))

    def flush(self) -> None:
        self._wake.set()

    async def next(self) -> pb.ServeEvent:
        """The next message. Waits for a flush.

        Raises:
            Overloaded: the gateway has not read for too long.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.overflowed:
                raise Overloaded(f"the gateway left {MAX_PENDING} deltas unread")
            if self._pending.ByteSize():
                event, self._pending = self._pending, pb.ServeEvent()
                return event


class GenerateSink:
    """One public call: deltas, then the completion, or an error."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delta | Completion | EkidenError] = asyncio.Queue()

    def delta(self, delta: Delta) -> None:
        self._queue.put_nowait(delta)

    def completion(self, completion: Completion) -> None:
        self._queue.put_nowait(completion)

    def error(self, request_id: str, error: EkidenError) -> None:
        self._queue.put_nowait(error)

    def flush(self) -> None:
        """Nothing to do: each item is a message of its own."""

    async def next(self) -> pb.GenerateEvent:
        """The next message; bounded by the request's own max_tokens.

        Raises:
            EkidenError: how the request failed.
        """
        item = await self._queue.get()
        if isinstance(item, EkidenError):
            raise item
        if isinstance(item, Completion):
            return pb.GenerateEvent(completion=completion_to_pb(item))
        return pb.GenerateEvent(delta=delta_to_pb(item))
