"""A background loop that is asked to stop rather than cancelled.

A cancellation that meets the Redis client in the middle of a call can get lost there, and the
task would go on for ever; a flag cannot get lost, and every call has its own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

_STOP_S = 3.0


class Periodic:
    """Awaits ``step`` every ``period_s`` seconds, first after one period, until ``stop``."""

    def __init__(self, step: Callable[[], Awaitable[object]], period_s: float, name: str) -> None:
        self._step = step
        self._period_s = period_s
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=name)

    async def stop(self) -> None:
        """Return when the loop has ended. ``step`` must end by itself within ``_STOP_S``."""
        self._stopping.set()
        await asyncio.wait({self._task}, timeout=_STOP_S)
        self._task.cancel()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._period_s)
                return
            await self._step()
