"""Memory that replicas of this host have been promised and do not hold yet.

Free memory says nothing of a replica that is about to load: two that start together would both
find room for one. So each books its forecast before it allocates, in a folder that the user's
replicas share, and takes the booking out once it is ready, when all of it is resident.

A booking is a file under an advisory lock for as long as its owner lives; the kernel ends the lock
with the process, however that ends, and whoever looks next removes the file.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from ekiden.core.errors import SetupError
from ekiden.core.file_lock import file_lock

LOCK_TIMEOUT_S = 10.0
"""The lock is held for a few reads of small files."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Booking:
    """One replica's promise; ``close`` takes it back. Idempotent."""

    def __init__(self, file: Path, size: int) -> None:
        self._file = file
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, f"{os.getpid()} {size}".encode())

    def close(self) -> None:
        if self._fd >= 0:
            self._file.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Booking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Ledger:
    """The bookings in one folder."""

    def __init__(self, folder: Path, resident: Callable[[int], int] | None = None) -> None:
        """``resident(pid)``: bytes that a process and its children hold already."""
        self._folder = folder
        self._resident = resident or tree_resident_bytes

    @classmethod
    def of_this_user(cls) -> Ledger:
        return cls(Path(tempfile.gettempdir()) / f"ekiden-memory-{os.getuid()}")

    def book(self, size: int, name: str, admit: Callable[[int], None]) -> Booking:
        """Promise ``size`` bytes to the replica ``name`` unless ``admit`` raises.

        ``admit`` hears how many bytes are promised to others and not yet resident; nobody else
        can book meanwhile.

        Raises:
            SetupError: the folder cannot be used, or its lock is never free.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with self._locked():
                admit(self._promised())
                return Booking(self._folder / f"{name}.{os.getpid()}.booking", size)
        except OSError as error:
            raise SetupError(
                f"{self._folder}, where replicas of this host book memory, cannot be used: "
                f"{error.strerror}"
            ) from None

    def _promised(self) -> int:
        return sum(self._outstanding(file) for file in self._folder.glob("*.booking"))

    def _outstanding(self, file: Path) -> int:
        with suppress(FileNotFoundError), file.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, size = map(int, stream.read().split())
                return max(0, size - self._resident(pid))
            file.unlink(missing_ok=True)  # Its owner is gone.
        return 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with file_lock(self._folder / "lock", LOCK_TIMEOUT_S) as held:
            if not held:
                raise SetupError(
                    f"{self._folder / 'lock'} has been held for {LOCK_TIMEOUT_S:.0f} s by "
                    "another replica that starts: is it stopped?"
                )
            yield


def tree_resident_bytes(pid: int) -> int:
    """Resident bytes of a process and all below it; 0 for what cannot be seen."""
    total, waiting = 0, [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        with suppress(OSError, IndexError):
            total += int((process / "statm").read_text().split()[1]) * _PAGE
        with suppress(OSError):
            for children in (process / "task").glob("*/children"):
                waiting.extend(map(int, children.read_text().split()))
    return total
