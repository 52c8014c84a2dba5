"""A lock that processes of one host share: advisory, on a file, waited for with a deadline."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.02


@contextmanager
def file_lock(
    path: Path, timeout_s: float, waiting: Callable[[], None] | None = None
) -> Iterator[bool]:
    """Whether the lock was had within ``timeout_s``; the kernel frees it with its process.

    ``waiting`` is called once if somebody else holds it.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("w") as stream:
        held = _try_lock(stream.fileno())
        if not held and waiting is not None:
            waiting()
        while not held and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            held = _try_lock(stream.fileno())
        yield held


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
