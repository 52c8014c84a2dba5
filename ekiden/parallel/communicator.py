"""What a group of ranks can do together, whatever carries the bytes.

A backend supplies two primitives, ``_sum`` and ``_collect``; shapes, dtypes and accounts are
handled here once. A sum is taken in rank order and in float32, and every rank gets the same
bits: ranks that went on from different bits would drift apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ekiden.core.clock import Clock, MonotonicClock


class Counter:
    """Calls, bytes that this rank put in, and seconds until the result was there."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.calls = 0
        self.bytes = 0
        self.seconds = 0.0
        self._clock = clock or MonotonicClock()

    @contextmanager
    def measure(self, x: Tensor) -> Iterator[None]:
        start = self._clock.now()
        yield
        self.calls += 1
        self.bytes += x.nbytes
        self.seconds += self._clock.now() - start

    def add(self, calls: int, moved: int, seconds: float) -> None:
        """What was counted elsewhere."""
        self.calls += calls
        self.bytes += moved
        self.seconds += seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedSums:
    """Memory of one host in which kernels can take a group's sums without Python.

    Tensors are uint8 and are kept here so that their addresses stay good. ``shm.py`` says how the
    memory is used.
    """

    entered: Tensor
    """A counter of the operations entered, 8 bytes in 64, for each rank."""
    slots: Tensor
    """[2, ranks, slot_bytes]."""
    slot_bytes: int
    failures: Tensor
    """A flag, 8 bytes in 64, for each rank of the mesh; not 0: it gave up."""
    books: array[int]
    """int64: the last operation entered; calls, bytes and nanoseconds that no ``Counter`` has
    yet; the rank that a failed wait was for."""
    timeout_s: float
    counter: Counter
    absent: Callable[[int], NoReturn]
    """Raises what ``all_reduce`` raises when it waited for that rank in vain."""

    @property
    def ranks(self) -> int:
        return len(self.entered) // 64

    def account(self) -> None:
        """Add what kernels have summed since the last call to the group's ``counter``."""
        _, calls, moved, nanoseconds, _ = self.books
        self.books[1:4] = array("q", [0] * 3)
        self.counter.add(calls, moved, nanoseconds / 1e9)

    def raise_absent(self) -> NoReturn:
        """Raises ReplicaFailed for the rank that a kernel waited for in vain."""
        self.absent(self.books[4])


class Communicator(ABC):
    """The collectives of one group. Every rank calls the same ones in the same order.

    Every wait has the deadline that the group was made with; when it runs out, ReplicaFailed
    names the ranks that did not come, and the group is of no use any more.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.counter = Counter()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, same shape and dtype. ``x`` may be overwritten.

        Raises:
            ReplicaFailed: a rank did not come in time, or gave up.
        """
        x = x.contiguous()
        with self.counter.measure(x):
            return self._sum(x)

    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Every rank's part, joined along ``dim``; rank r's part is ``sizes[r]`` long there.

        Raises:
            ReplicaFailed: a rank did not come in time, or gave up.
        """
        parts = self._parts(x, sizes, dim, root=None)
        assert parts is not None, "a gather without a root reaches every rank"
        return torch.cat(parts, dim)

    def gather(self, x: Tensor, sizes: Sequence[int], dim: int, root: int = 0) -> Tensor | None:
        """As ``all_gather``, on ``root`` only; None on the other ranks.

        Raises:
            ReplicaFailed: a rank did not come in time, or gave up.
        """
        parts = self._parts(x, sizes, dim, root=root)
        return None if parts is None else torch.cat(parts, dim)

    def shared_sums(self) -> SharedSums | None:
        """Where kernels can take this group's sums themselves; None where they cannot.

        Such a sum is an ``all_reduce`` like any other: every rank takes it, in the same order.
        """
        return None

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Tell the others that this rank gives up, so that they need not wait for a deadline."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the group holds. Not a collective; idempotent."""

    def _parts(
        self, x: Tensor, sizes: Sequence[int], dim: int, root: int | None
    ) -> list[Tensor] | None:
        shapes = [[*x.shape] for _ in sizes]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[dim] = size
        if list(x.shape) != shapes[self.rank]:
            raise ValueError(
                f"rank {self.rank} gathers {list(x.shape)}, not {shapes[self.rank]} as agreed"
            )
        x = x.contiguous()
        with self.counter.measure(x):
            return self._collect(x, shapes, root)

    @abstractmethod
    def _sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of contiguous ``x``, in rank order, in float32, then ``x.dtype``."""

    @abstractmethod
    def _collect(
        self, x: Tensor, shapes: Sequence[Sequence[int]], root: int | None
    ) -> list[Tensor] | None:
        """The parts of all ranks, shaped as told; None where ``root`` is another rank."""


class Solo(Communicator):
    """A group of one: nothing to send, nothing to wait for, nothing to count."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def abort(self, reason: str) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""

    def _sum(self, x: Tensor) -> Tensor:
        return x

    def _parts(
        self, x: Tensor, sizes: Sequence[int], dim: int, root: int | None
    ) -> list[Tensor] | None:
        return [x]

    def _collect(
        self, x: Tensor, shapes: Sequence[Sequence[int]], root: int | None
    ) -> list[Tensor] | None:
        return [x]


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in order of the list, taken in float32, as the parts' dtype; a new tensor.

    The order is fixed, so equal parts give equal bits on every rank.
    """
    if len(parts) == 2:
        return parts[0] + parts[1]  # computed in float32 and rounded once: the same bits
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
