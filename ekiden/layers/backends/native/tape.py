"""A step's operations, recorded once and replayed by one call, as a CUDA graph is.

Between stretches of native operations a tape may hold calls of Python, for what no kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ekiden.layers.backends.native.library import KernelError, KernelFailed, Op, Pool
from ekiden.parallel.communicator import SharedSums

if TYPE_CHECKING:
    from ctypes import Array

Outputs = tuple[Tensor, ...]
Call = Callable[[], None]


def run(pool: Pool, ops: Array[Op], sums: Sequence[SharedSums]) -> None:
    """Run ``ops``; ``sums`` are the groups that their all-reduces belong to.

    Raises:
        ReplicaFailed: a rank that an all-reduce waited for did not come, or gave up.
        KernelFailed: as ``Pool.run``.
    """
    try:
        pool.run(ops)
    except KernelFailed as error:
        if error.error == KernelError.RANK_MISSING:
            books = ops[error.index].p[4]
            next(s for s in sums if s.books.buffer_info()[0] == books).raise_absent()
        raise
    finally:
        for group in sums:
            group.account()


@dataclass(frozen=True, eq=False)
class Replay:
    """A finished tape; calling it runs the step."""

    calls: list[Call]
    outputs: Outputs
    kept: object

    def __call__(self) -> Outputs:
        for call in self.calls:
            call()
        return self.outputs


class Tape:
    """Takes operations and calls in order; holds addresses, and what the calls hold."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parts: list[list[Op] | Call] = []
        self._sums: dict[int, SharedSums] = {}

    def add(self, op: Op, sums: SharedSums | None = None) -> None:
        if sums is not None:
            self._sums[id(sums)] = sums
        if not self._parts or not isinstance(self._parts[-1], list):
            self._parts.append([])
        stretch = self._parts[-1]
        assert isinstance(stretch, list), "appended above"
        stretch.append(op)

    def call(self, function: Call) -> None:
        self._parts.append(function)

    def finish(self, outputs: Outputs, kept: object) -> Replay:
        """What runs everything again and gives ``outputs`` back, overwritten.

        ``kept`` holds what the operations read.
        """
        calls = [self._runner(p) if isinstance(p, list) else p for p in self._parts]
        return Replay(calls, outputs, kept)

    def _runner(self, ops: list[Op]) -> Call:
        array = (Op * len(ops))(*ops)
        used = {op.p[4] for op in array}
        sums = [s for s in self._sums.values() if s.books.buffer_info()[0] in used]
        return lambda: run(self._pool, array, sums)
