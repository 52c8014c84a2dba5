"""The sessions of one replica, as its service sees them. No torch, no asyncio, no thread.

All methods of an object are called from one thread. Nothing blocks: commands go to the ports
through ``send_port(message, rank)``, the ports' answers come in by ``on_port``, and ``poll``
hands out what happened. Call ``tick`` when ``next_deadline`` has passed.
"""

from __future__ import annotations

from ekiden.core.clock import Clock
from kv_transfer.description import ReplicaDescription
from kv_transfer.messages import BlockRead, TransferLimits, decode_event
from kv_transfer.receive_sessions import ReceiveSessions
from kv_transfer.send_sessions import SendSessions
from kv_transfer.session import SessionEvent
from kv_transfer.session_table import SendPort

__all__ = ["ReceiveSessions", "SendSessions", "Sessions"]


class Sessions:
    """All hand-offs of one replica. Prefill sends, but for prefixes that it fetches; decode the
    other way about. The numbers of sessions tell the direction: those that receive are odd."""

    def __init__(
        self, me: ReplicaDescription, send_port: SendPort, clock: Clock, limits: TransferLimits
    ) -> None:
        self.receiving = ReceiveSessions(me, send_port, clock, limits)
        self.sending = SendSessions(me, send_port, clock, limits)

    @property
    def open_count(self) -> int:
        return self.receiving.open_count + self.sending.open_count

    def states(self) -> list[str]:
        return self.receiving.states() + self.sending.states()

    def stuck(self) -> list[str]:
        return self.receiving.stuck() + self.sending.stuck()

    def on_port(self, rank: int, message: bytes) -> None:
        event = decode_event(message)
        if isinstance(event, BlockRead):
            self.receiving.dropped += 1
        elif event.session % 2:
            self.receiving.hear(rank, event)
        else:
            self.sending.hear(rank, event)

    def fail(self, session: int, reason: str) -> None:
        self.receiving.fail(session, reason)
        self.sending.fail(session, reason)

    def tick(self) -> None:
        self.receiving.tick()
        self.sending.tick()

    def next_deadline(self) -> float | None:
        both = (self.receiving.next_deadline(), self.sending.next_deadline())
        return min((deadline for deadline in both if deadline is not None), default=None)

    def poll(self) -> list[SessionEvent]:
        return [*self.receiving.poll(), *self.sending.poll()]
