"""What becomes of a hand-off session, for the one who waits for it."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from ekiden.core.errors import EkidenError

T = TypeVar("T")


class Outcome(Generic[T]):
    """Set once, by whichever word comes first; later ones change nothing."""

    def __init__(self) -> None:
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def good(self, event: T) -> None:
        if not self.future.done():
            self.future.set_result(event)

    def bad(self, error: EkidenError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def abandon(self) -> bool:
        """Nobody waits any more. True if nothing had been said: the session is still at work."""
        unfinished = not self.future.done()
        self.future.cancel()
        if not self.future.cancelled():
            self.future.exception()  # seen: it has been raised or makes no difference
        return unfinished
