"""How a port's thread sleeps: on all its wires at once, and on whoever has a command for it."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable


class Poller:
    """Sleeps until one of ``fds`` is readable or ``wake`` is called."""

    def __init__(self, fds: Iterable[int]) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        for fd in (self._wake, *fds):
            self._epoll.register(fd, select.EPOLLIN)

    def wake(self) -> None:
        """End a sleep, or the next one. Any thread."""
        os.eventfd_write(self._wake, 1)

    def sleep(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(max(timeout_s, 0.0)):
            if fd == self._wake:
                os.eventfd_read(self._wake)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wake)
