"""Memory that the ranks of one host share, without a name that could be left behind.

The owner makes an anonymous file (memfd) and passes its path under /proc; ranks map it. The
kernel frees it when the last process that holds it is gone, however it went, and it does not
count against the size of /dev/shm, which containers keep small.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor

from ekiden.core.errors import SetupError


def supported() -> bool:
    """Whether this machine has memfd and orders stores as ``shm.py`` needs (x86-64 does)."""
    return sys.platform == "linux" and platform.machine().lower() in ("x86_64", "amd64")


class SegmentOwner:
    """The anonymous file of one mesh; keep it open until every rank has attached."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("ekiden-mesh", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Let go; ranks that are attached keep the memory. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Segment:
    """One rank's mapping of the file."""

    def __init__(self, path: str) -> None:
        try:
            with Path(path).open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise SetupError(
                f"the ranks' shared memory {path} cannot be opened ({error.strerror}): "
                "the process that started the ranks is gone, or belongs to another user"
            ) from None

    def words(self, offset: int, count: int) -> memoryview:
        """``count`` 64-bit counters; reading or writing one is a single load or store."""
        return memoryview(self._map)[offset : offset + 8 * count].cast("Q")

    def text(self, offset: int, size: int) -> memoryview:
        return memoryview(self._map)[offset : offset + size]

    def bytes(self, offset: int, size: int) -> Tensor:
        """uint8 [size], sharing the memory."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)
