"""Between asyncio, where calls arrive, and the thread of the engine and of its ranks.

Everything a service knows is touched on its event loop only; this file is where other threads
hand things over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from ekiden.core.clock import Clock
from ekiden.engine.engine import Engine, EngineOutput
from ekiden.engine.executor import HostingExecutor
from ekiden.engine.loop import EngineLoop
from kv_transfer.session import SessionEvent
from kv_transfer.sessions import Sessions

T = TypeVar("T")

logger = logging.getLogger(__name__)


class EngineBridge:
    """Runs functions on the engine's thread and brings its outputs back to the event loop."""

    def __init__(
        self,
        engine: Engine,
        executor: HostingExecutor,
        on_output: Callable[[EngineOutput], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._engine_loop = EngineLoop(
            engine,
            executor,
            on_output=lambda output: post_to_loop(loop, on_output, output),
            on_fatal=lambda error: post_to_loop(loop, on_fatal, error),
        )
        self._engine_loop.start()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """The result of ``function(engine)``, run between two steps.

        A caller that is cancelled does not take back what it asked for: the function still runs.
        """
        return await asyncio.shield(asyncio.wrap_future(self._engine_loop.call(function)))

    def post(self, function: Callable[[Engine], object]) -> None:
        """Run ``function(engine)`` between two steps, without waiting for it."""
        self._engine_loop.call(function)

    def stop(self, timeout_s: float) -> None:
        self._engine_loop.stop(timeout_s)


async def or_drop(asking: Awaitable[T], drop: Callable[[T], object]) -> T:
    """What ``asking`` brings. If it comes when nobody waits for it any more, ``drop`` gets it:
    what it holds would be held for ever."""
    task = asyncio.ensure_future(asking)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(_drop_late, drop))
        raise


def _drop_late(drop: Callable[[T], object], task: asyncio.Future[T]) -> None:
    if not task.cancelled() and task.exception() is None:
        drop(task.result())


class SessionPump:
    """Feeds the hand-off sessions with port messages and time, and passes on what they say."""

    def __init__(
        self,
        sessions: Sessions,
        clock: Clock,
        on_event: Callable[[SessionEvent], None],
    ) -> None:
        self._sessions = sessions
        self._clock = clock
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._told: set[str] = set()

    def on_port(self, rank: int, message: bytes) -> None:
        """A message of a rank's port. Called on a thread of the executor."""
        post_to_loop(self._loop, self._heard, (rank, message))

    def _heard(self, item: tuple[int, bytes]) -> None:
        self._sessions.on_port(*item)
        self.pump()

    def pump(self) -> None:
        """Pass on what the sessions have to say. Call after every call into the sessions."""
        for event in self._sessions.poll():
            self._on_event(event)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._sessions.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - self._clock.now())
            self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._sessions.tick()
        for trouble in set(self._sessions.stuck()) - self._told:
            self._told.add(trouble)
            logger.error("%s", trouble)
        self.pump()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def post_to_loop(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], item: T) -> None:
    """Call on the loop, or not at all once the loop has closed: the process is ending then."""
    try:
        loop.call_soon_threadsafe(function, item)
    except RuntimeError:
        if not loop.is_closed():
            raise
