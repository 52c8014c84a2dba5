"""The open sessions of one replica in one direction, and what does not depend on the direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from ekiden.core.clock import Clock
from ekiden.core.errors import Overloaded
from kv_transfer import reshard
from kv_transfer.description import ReplicaDescription
from kv_transfer.messages import Abort, BlockRead, PortEvent, TransferLimits, decode_event, encode
from kv_transfer.session import Drained, ReceiveSession, SendSession, SessionEvent

SendPort = Callable[[bytes, int | None], None]
S = TypeVar("S", ReceiveSession, SendSession)


class SessionTable(Generic[S]):
    """The table of open sessions and everything that does not depend on the side."""

    def __init__(
        self, me: ReplicaDescription, send_port: SendPort, clock: Clock, limits: TransferLimits
    ) -> None:
        self._me = me
        self._send_port = send_port
        self._clock = clock
        self._limits = limits
        self._open: dict[int, S] = {}
        self._events: list[SessionEvent] = []
        self.dropped = 0
        """Messages of another epoch or of a session that is not open."""

    @property
    def open_count(self) -> int:
        """Sessions whose Drained has not come yet, stuck ones included."""
        return len(self._open)

    def states(self) -> list[str]:
        """The state of every open session, as ``session.State`` names it, in lower case."""
        return [session.state.name.lower() for session in self._open.values()]

    def stuck(self) -> list[str]:
        """One sentence for each session whose blocks are in quarantine for good."""
        return [text for s in self._open.values() if (text := s.stuck()) is not None]

    def on_port(self, rank: int, message: bytes) -> None:
        """What a rank's port emitted."""
        event = decode_event(message)
        if isinstance(event, BlockRead):
            self.dropped += 1
        else:
            self.hear(rank, event)

    def hear(self, rank: int, event: PortEvent) -> None:
        """The same, decoded."""
        session = self._open.get(event.session)
        if session is None or event.epoch != self._me.epoch:
            self.dropped += 1
            return
        session.on_rank(rank, event, self._clock.now())
        self._settle(session)

    def fail(self, session: int, reason: str) -> None:
        """Cancel, or the peer is gone. Does nothing for a session that has ended or failed."""
        if (found := self._open.get(session)) is not None:
            found.fail(reason, self._clock.now())
            self._settle(found)

    def tick(self) -> None:
        """Act on every deadline that has passed."""
        now = self._clock.now()
        for session in list(self._open.values()):
            session.tick(now)
            self._settle(session)

    def next_deadline(self) -> float | None:
        """On the clock that was passed in; None if nothing is waited for."""
        return min(
            (s.deadline for s in self._open.values() if s.deadline is not None), default=None
        )

    def _take(self) -> list[SessionEvent]:
        events, self._events = self._events, []
        return events

    def _check_room(self) -> None:
        if len(self._open) >= self._limits.max_sessions:
            raise Overloaded(
                f"{self._me.replica_id} has {len(self._open)} hand-off sessions open, its limit"
            )

    def _add(self, session: S, commands: Iterable[tuple[int, msgspec.Struct]]) -> None:
        self._open[session.session] = session
        for rank, command in commands:
            self._send_port(encode(command), rank)
        self._settle(session)

    def _settle(self, session: S) -> None:
        for rank in session.aborts:
            self._send_port(encode(Abort(session=session.session)), rank)
        session.aborts.clear()
        self._events += session.events
        if any(isinstance(event, Drained) for event in session.events):
            del self._open[session.session]
        session.events.clear()


def total_bytes(source: ReplicaDescription, target: ReplicaDescription, tokens: int) -> int:
    shares = reshard.pairs(source.kv, target.kv)
    return tokens * sum(pair.token_bytes(source.kv) for pair in shares)
