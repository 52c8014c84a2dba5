"""A seat in the table by which the ranks of one host share its cores (``src/cores.h``).

The table lies in shared memory, in a folder that only this user can enter. Whoever cannot have a
seat computes with its own share of threads, as if it were alone.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import stat
import weakref
from pathlib import Path

from ekiden.core.file_lock import file_lock

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
SEATS = 64
LOCK_TIMEOUT_S = 5.0


class _Seat(ctypes.Structure):
    """``Seat`` of ``src/cores.h``."""

    _fields_ = (
        ("until", ctypes.c_int64),
        ("share", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("unused", ctypes.c_char * 48),
        ("cores", ctypes.c_uint64 * 16),
    )


SEAT_BYTES = ctypes.sizeof(_Seat)
_Table = _Seat * SEATS


class Seat:
    """One rank's place at the table, until it is closed or the process ends."""

    def __init__(self, table: ctypes.Array[_Seat], number: int) -> None:
        self.count, self.number = SEATS, number
        self.address, self.row = ctypes.addressof(table), table[number]
        self.close = weakref.finalize(self, _leave, self.row)


def take_seat(share: int, folder: Path | None = None) -> Seat | None:
    """A seat for a rank that may always run ``share`` threads; None, and a line in the log, where
    there is none to be had.
    """
    try:
        folder = _private_folder(folder or SHARED_MEMORY / f"ekiden-{os.geteuid()}")
        table = _table(folder / "cores")
        with file_lock(folder / "cores.lock", LOCK_TIMEOUT_S) as locked:
            number = _free_seat(table) if locked else None
            if number is not None:
                _sit(table[number], share)
                return Seat(table, number)
        reason = f"all {SEATS} seats are taken" if locked else "its table is locked"
    except OSError as error:
        reason = str(error)
    logger.warning("cores are not shared with other ranks of this host: %s", reason)
    return None


def _private_folder(folder: Path) -> Path:
    """Raises OSError where somebody else could change what is in it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def _table(path: Path) -> ctypes.Array[_Seat]:
    size = ctypes.sizeof(_Table)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Memory is taken now: where there is none, a store would end the process (SIGBUS).
        os.posix_fallocate(descriptor, 0, size)
        return _Table.from_buffer(mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)


def _free_seat(table: ctypes.Array[_Seat]) -> int | None:
    """The first that nobody has, or whose holder is dead."""
    return next((i for i, seat in enumerate(table) if not _alive(seat.pid)), None)


def _alive(pid: int) -> bool:
    if pid == 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sit(seat: _Seat, share: int) -> None:
    words = [0] * 16
    for core in os.sched_getaffinity(0):
        words[core // 64] |= 1 << core % 64
    seat.until, seat.share, seat.cores = 0, share, (ctypes.c_uint64 * 16)(*words)
    seat.pid = os.getpid()


def _leave(seat: _Seat) -> None:
    seat.until = seat.pid = 0
