"""What the engine tells the service that drives it."""

from __future__ import annotations

import msgspec

from ekiden.core.types import Delta


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A hand-off's turn is near: open its session with ``open_session``."""

    request_id: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """A request's first chunk is in a step. ``cached_tokens`` of its prompt were in the cache."""

    request_id: str
    cached_tokens: int


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    """A hand-off's prompt is computed; its blocks stay until ``let_go``."""

    request_id: str
    cached_tokens: int
    computed_tokens: int


EngineEvent = Ready | Started | PrefillDone


class RequestFinished(msgspec.Struct, frozen=True, kw_only=True):
    """A request's last choice has ended. Tokens of its prompt: cached + computed, here only."""

    request_id: str
    completion_tokens: int
    cached_tokens: int
    computed_tokens: int
    preemptions: int


class EngineOutput(msgspec.Struct, kw_only=True):
    """Everything that came out since the last time.

    ``Ready`` and ``Started`` come before a request's deltas, ``PrefillDone`` and its
    ``RequestFinished`` after them.
    """

    deltas: list[Delta] = []
    events: list[EngineEvent] = []
    finished: list[RequestFinished] = []
    room: bool = False
    """Blocks or seats became free: what ``reserve`` had no room for may fit now."""

    def __bool__(self) -> bool:
        return bool(self.deltas or self.events or self.finished or self.room)


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks for a prompt whose KV comes from another replica.

    The request and the writer own them; ``writer_done(key)`` says that the writer has let go.
    """

    key: int
    """The writer's name; never used twice."""
    blocks: tuple[int, ...]
    """Block table of the whole prompt."""
    held_tokens: int
    """Positions [0, held_tokens) are there already and must not be written."""
