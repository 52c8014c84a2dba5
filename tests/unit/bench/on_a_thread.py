"""A server on a loop of its own, for what runs a loop itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def on_a_thread(serving: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What ``serving`` gives, while the block lasts."""
    found: list[T] = []
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving() as one:
            found.append(one)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()
