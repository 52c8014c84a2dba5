"""The library of kernels as Python sees it: operations, and the team of threads that runs them."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ekiden.core.errors import InvariantBroken
from ekiden.layers.backends.native.build import NativeUnavailable, library_file
from ekiden.layers.backends.native.cores import SEAT_BYTES, Seat

if TYPE_CHECKING:
    from ctypes import Array

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Of activations, by the number that kernels know it by."""
SPIN_US = 50.0
"""How long a thread that waits for the next operation spins before it sleeps."""


class Kind(IntEnum):
    """Operations, by the number in ``ekiden.h``."""

    LINEAR = 0
    QUANTISED_LINEAR = 1
    NORM = 2
    ADD_NORM = 3
    GATED = 4
    ROTATE_STORE = 5
    ATTEND = 6
    EMBED = 7
    ALL_REDUCE = 8


class KernelError(IntEnum):
    """Why a list of operations ended early, by the number in ``ekiden.h``."""

    UNKNOWN_KIND = 1
    BAD_ARGUMENT = 2
    NO_ROOM = 3
    FORKED = 4
    RANK_MISSING = 5


REASONS = {
    KernelError.UNKNOWN_KIND: "no such operation",
    KernelError.BAD_ARGUMENT: "an argument it cannot take",
    KernelError.NO_ROOM: "it wants more scratch memory than a team has",
    KernelError.FORKED: "its threads stayed in the parent process",
    KernelError.RANK_MISSING: "another rank did not come in time, or gave up",
}


class KernelFailed(InvariantBroken):
    """A kernel refused its arguments; nothing it was to write can be used."""

    def __init__(self, kind: str, index: int, code: int) -> None:
        reason = REASONS[KernelError(code)] if code in REASONS else f"error {code}"
        super().__init__(f"operation {index} ({kind}) of a native step: {reason}")
        self.index = index
        self.error = code


class Op(ctypes.Structure):
    """One operation; what each field holds is said beside its kernel in ``src``."""

    _fields_ = (
        ("kind", c_int32),
        ("dtype", c_int32),
        ("p", c_void_p * 12),
        ("n", c_int64 * 16),
        ("f", c_float * 4),
    )


SIGNATURES: dict[str, tuple[type[Any] | None, list[type[Any]]]] = {
    "ekiden_pool_create": (c_void_p, [c_int32, c_int64, c_void_p, c_int32, c_int32]),
    "ekiden_pool_destroy": (None, [c_void_p]),
    "ekiden_run": (c_int32, [c_void_p, POINTER(Op), c_int64, POINTER(c_int64)]),
    "ekiden_team": (c_int32, [c_void_p]),
    "ekiden_times": (None, [c_void_p, POINTER(c_int64)]),
    "ekiden_op_bytes": (c_int64, []),
    "ekiden_kinds": (c_int64, []),
    "ekiden_seat_bytes": (c_int64, []),
    "ekiden_pack_dense": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32]),
    "ekiden_quantised_bytes": (c_int64, [c_int64, c_int64, c_int64, c_int64, c_int32]),
    "ekiden_pack_quantised": (None, [c_void_p] * 4 + [c_int64] * 4),
    "ekiden_copy_boxes": (None, [c_void_p, c_int64, c_int32]),
    "ekiden_convert_boxes": (c_int32, [c_void_p, c_int64, c_int64, c_int32, c_int32]),
}
"""What the library offers: result, arguments."""


@cache
def load() -> ctypes.CDLL:
    """The library, built on first use.

    Raises:
        NativeUnavailable: it cannot be had on this machine; the message says why.
    """
    try:
        library = ctypes.CDLL(str(library_file()))
    except OSError as error:
        raise NativeUnavailable(f"the library does not load: {error}") from error
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    seen = library.ekiden_op_bytes(), library.ekiden_kinds(), library.ekiden_seat_bytes()
    if seen != (ctypes.sizeof(Op), len(Kind), SEAT_BYTES):
        raise InvariantBroken(f"ekiden.h and library.py differ: {seen}")
    return library


class Pool:
    """A team of threads, of which the caller is one; the rest sleep when there is no work.

    One list runs at a time: a second caller waits for the first. Not usable after a fork.
    """

    def __init__(self, threads: int, *, seat: Seat | None = None, spin_us: float = SPIN_US) -> None:
        """A team of ``threads``, the caller counted: with a ``seat`` the most that ever compute,
        of which those that others on this host leave idle do, and the seat's share always.

        Raises:
            ValueError: no threads.
            NativeUnavailable: the library, the threads or their memory cannot be had.
        """
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._library = load()
        self.threads = threads
        self.seat = seat
        self._pool = self._library.ekiden_pool_create(
            threads,
            int(spin_us * 1000),
            seat.address if seat else None,
            seat.count if seat else 0,
            seat.number if seat else 0,
        )
        if not self._pool:
            raise NativeUnavailable(f"{threads} threads and their scratch memory cannot be had")
        self.close = weakref.finalize(self, self._library.ekiden_pool_destroy, self._pool)
        """End the threads; nothing may run afterwards."""

    def run(self, ops: Array[Op], count: int | None = None) -> None:
        """Run the first ``count`` operations (all, if None) in order; the GIL is released.

        Raises:
            KernelFailed: an operation refused its arguments; those after it did not run.
        """
        if not self.close.alive:
            raise InvariantBroken("the pool of kernel threads is closed")
        count = len(ops) if count is None else count
        failed = c_int64(-1)
        code = self._library.ekiden_run(self._pool, ops, count, failed)
        if code:
            raise KernelFailed(_name(ops, failed.value), failed.value, code)

    @property
    def team(self) -> int:
        """Threads that the last operation ran on, the caller counted."""
        return int(self._library.ekiden_team(self._pool))

    def seconds(self) -> dict[Kind, float]:
        """Time spent in each kind of operation since the start, waits for threads included."""
        ns = (c_int64 * len(Kind))()
        self._library.ekiden_times(self._pool, ns)
        return {kind: ns[kind] / 1e9 for kind in Kind}


def _name(ops: Array[Op], index: int) -> str:
    number = ops[index].kind if index >= 0 else -1
    return Kind(number).name if number in set(Kind) else f"kind {number}"


def op(
    kind: Kind,
    dtype: torch.dtype,
    pointers: list[int],
    numbers: list[int],
    floats: list[float] | None = None,
) -> Op:
    """One operation; pointers are addresses (0 for none), the rest of each array is zero."""
    made = Op(kind=kind, dtype=DTYPES[dtype])
    made.p[: len(pointers)] = pointers
    made.n[: len(numbers)] = numbers
    if floats:
        made.f[: len(floats)] = floats
    return made
