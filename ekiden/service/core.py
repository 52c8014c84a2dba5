"""The parts that a prefill and a decode replica have in common, joined and wired once.

engine ── EngineBridge ──▶ event loop ◀── SessionPump ── KV ports, all on the ranks' thread
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ekiden.core.errors import EkidenError, ReplicaFailed
from ekiden.core.types import BlockBooks, ReplicaStats
from ekiden.engine.engine import EngineOutput
from ekiden.rpc import replica_pb2_grpc
from ekiden.rpc.server import RpcServer
from ekiden.service.bridge import EngineBridge, SessionPump
from ekiden.service.kv_reader import KvReader
from ekiden.service.replica import Replica
from ekiden.service.servicer import PeerTable, ReplicaServicer
from kv_transfer.messages import Computed, TransferLimits, encode
from kv_transfer.session import SessionEvent
from kv_transfer.sessions import Sessions

STOP_TIMEOUT_S = 5.0


class ReplicaCore(ABC):
    """Lives on the service's event loop; a role says what its engine and sessions' words mean."""

    def __init__(self, replica: Replica, on_fatal: Callable[[BaseException], None]) -> None:
        self.replica = replica
        self.clock = replica.clock
        self.me = replica.describe()
        self.met = PeerTable()
        self._on_fatal = on_fatal
        executor = replica.executor
        self.bridge = EngineBridge(replica.engine, executor, self._on_output, self._fatal)
        self.sessions = Sessions(self.me, executor.send_port, self.clock, TransferLimits())
        self.pump = SessionPump(self.sessions, self.clock, self._on_session)
        self.reader = KvReader(self.bridge, executor.send_port, len(self.me.kv.ranks))
        executor.on_port_message(self._on_port)

    @abstractmethod
    def _on_output(self, output: EngineOutput) -> None:
        """What came out of the engine, in order."""

    @abstractmethod
    def _on_session(self, event: SessionEvent) -> None:
        """What became of a hand-off session."""

    @abstractmethod
    def _tell_all(self, error: EkidenError) -> None:
        """The engine is gone: everybody who waits for it must hear."""

    def register(self, server: RpcServer) -> None:
        """Serve what every worker answers."""
        reader = self.reader if self.replica.config.enable_kv_debug else None
        servicer = ReplicaServicer(self.me, self.met, self.audit, self.states, reader)
        replica_pb2_grpc.add_ReplicaServicer_to_server(servicer, server.raw)

    def _on_port(self, rank: int, message: bytes) -> None:
        if not self.reader.hear(message):
            self.pump.on_port(rank, message)

    def _fatal(self, error: BaseException) -> None:
        self._tell_all(error if isinstance(error, EkidenError) else ReplicaFailed(repr(error)))
        self._on_fatal(error)

    def fail_session(self, session: int, reason: str) -> None:
        """Give a hand-off up; its blocks stay held until it has drained."""
        self.sessions.fail(session, reason)
        self.pump.pump()

    def say_computed(self, session: int, blocks: Sequence[int], *, held: bool) -> None:
        """Have the ranks send a session's KV out of ``blocks``, without a step that computes it.
        ``held``: nobody else writes there meanwhile."""
        end = self.sessions.sending.asked_tokens(session)
        command = Computed(session=session, end=end, blocks=tuple(blocks), held=held)
        self.replica.executor.send_port(encode(command), None)

    async def audit(self) -> tuple[BlockBooks, ReplicaStats]:
        """The books and the load of this moment."""
        open_sessions = self.sessions.open_count
        books = await self.bridge.call(lambda _: self.replica.books(open_sessions))
        return books, self.replica.stats()

    def states(self) -> list[str]:
        """The state of each hand-off session, and of whatever else the role waits for."""
        return self.sessions.states()

    async def close(self) -> None:
        self.pump.close()
        await asyncio.to_thread(self.bridge.stop, STOP_TIMEOUT_S)
