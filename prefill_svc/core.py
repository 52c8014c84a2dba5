"""What every run of a prefill replica shares, and the switchboard of its events.

All of it runs on the service's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from ekiden.core.errors import BadRequest, EkidenError, Unavailable
from ekiden.core.types import Delta
from ekiden.engine.engine import EngineEvent, EngineOutput
from ekiden.service.core import ReplicaCore
from ekiden.service.replica import Replica
from kv_transfer.description import ReplicaDescription
from kv_transfer.session import Arrived, Drained, Failed, SealedOut, SessionEvent


class Fetching(Protocol):
    """Who a receiving session is for: a prefix that is fetched from decode."""

    key: int
    """Of the blocks that it writes into."""

    def on_arrived(self, event: Arrived) -> None: ...

    def on_failed(self, event: Failed) -> None: ...


Happening = EngineEvent | Delta | SealedOut | Failed | EkidenError
"""What a run may be told."""


class PrefillCore(ReplicaCore):
    """The engine, the sessions and the peers of one prefill replica, and who waits for what."""

    def __init__(self, replica: Replica, on_fatal: Callable[[BaseException], None]) -> None:
        self._inboxes: dict[str, asyncio.Queue[Happening]] = {}
        self._sessions: dict[int, str] = {}
        self._fetches: dict[int, Fetching] = {}
        self._numbers = itertools.count(1)
        super().__init__(replica, on_fatal)

    def caller(self, prefill_epoch: int, replica_id: str, epoch: int) -> ReplicaDescription:
        """The decode replica that calls, if both sides live the lives they believe in.

        Raises:
            Unavailable, BadRequest: they do not.
        """
        if prefill_epoch != self.me.epoch:
            raise Unavailable(
                f"prefill replica {self.me.replica_id} has restarted since it was chosen"
            )
        peer = self.met.get(replica_id, epoch)
        if peer is None:
            raise BadRequest(
                f"decode replica {replica_id!r} has not met this prefill replica: "
                "call Replica.Meet first",
                field="decode_replica",
            )
        return peer

    def open_run(self, request_id: str) -> tuple[str, asyncio.Queue[Happening]]:
        """A local id and an inbox for one run. A request that comes back after a failure gets
        another id, so that it never meets what is left of its first life."""
        local_id = f"{request_id}#{next(self._numbers)}"
        inbox: asyncio.Queue[Happening] = asyncio.Queue()
        self._inboxes[local_id] = inbox
        return local_id, inbox

    def close_run(self, local_id: str) -> None:
        """The run says nothing more. Its blocks go with the later of the run and its session: a
        short transfer may be over before the engine has told of the tokens it computed."""
        self._inboxes.pop(local_id, None)
        if local_id not in self._sessions.values():
            self._let_go(local_id)

    def _let_go(self, local_id: str) -> None:
        self.bridge.post(lambda engine: engine.let_go(local_id))

    def open_session(self, local_id: str, offer: bytes, peer: ReplicaDescription) -> int:
        """Prepare to send what the offer asks for. Blocks are held until the session drains.

        Raises:
            EkidenError: the offer is of another life, or cannot be served.
        """
        session = self.sessions.sending.open(offer, peer)
        self._sessions[session] = local_id
        self.pump.pump()
        return session

    def send_anything(self, session: int) -> None:
        """Have the ranks send what a session asks for out of whatever is in their caches.

        Raises:
            BadRequest: the cache does not have so many positions.
        """
        tokens = self.sessions.sending.asked_tokens(session)
        count = -(-tokens // self.me.kv.block_size)
        if count > self.replica.executor.num_blocks:
            raise BadRequest(f"{tokens} positions are more than this replica's KV cache has")
        self.say_computed(session, range(count), held=False)

    def _tell(self, local_id: str, happening: Happening) -> None:
        if inbox := self._inboxes.get(local_id):
            inbox.put_nowait(happening)

    def _on_output(self, output: EngineOutput) -> None:
        for delta in output.deltas:
            self._tell(delta.request_id, delta)
        for event in output.events:
            self._tell(event.request_id, event)

    def _on_session(self, event: SessionEvent) -> None:
        if (fetching := self._fetches.get(event.session)) is not None:
            self._on_fetch(fetching, event)
            return
        local_id = self._sessions.get(event.session)
        if local_id is None:
            return
        if isinstance(event, Drained):
            del self._sessions[event.session]
            if local_id not in self._inboxes:
                self._let_go(local_id)
        elif isinstance(event, SealedOut | Failed):
            self._tell(local_id, event)

    def open_fetch(
        self,
        fetching: Fetching,
        peer: ReplicaDescription,
        start: int,
        end: int,
        blocks: Sequence[int],
        wire: str,
    ) -> tuple[int, bytes]:
        """Open the session that fills blocks of a prefix; returns its number and the offer.

        Raises:
            EkidenError: it cannot be opened; the blocks are still the caller's to let go.
        """
        session, offer = self.sessions.receiving.open("prefix", peer, start, end, blocks, wire)
        self._fetches[session] = fetching
        self.pump.pump()
        return session, offer

    def seal_fetch(self, session: int, seal: bytes) -> None:
        self.sessions.receiving.sealed(session, seal)
        self.pump.pump()

    def _on_fetch(self, fetching: Fetching, event: SessionEvent) -> None:
        if isinstance(event, Arrived):
            fetching.on_arrived(event)
        elif isinstance(event, Failed):
            fetching.on_failed(event)
        elif isinstance(event, Drained):
            del self._fetches[event.session]
            key = fetching.key
            self.bridge.post(lambda engine: engine.writer_done(key))

    def _tell_all(self, error: EkidenError) -> None:
        for local_id in list(self._inboxes):
            self._tell(local_id, error)

    @property
    def busy(self) -> bool:
        """Whether a run or a session is still open."""
        return bool(self._inboxes or self._sessions or self._fetches)
