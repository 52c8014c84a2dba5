"""Collectives and pipeline links of ranks on one host, through shared memory.

**Collectives.** Every rank has two slots and a counter of the operations it has entered. In
operation n a rank writes slot n mod 2, sets its counter to n, and reads the others' slots once
their counters say n. A rank that says n + 1 has done with n, so slot n mod 2 may be written
again for n + 2 once all counters are at n + 1: one wait an operation, no second barrier.

**Links.** A ring of slots with a count of those filled and of those emptied.

Kernels may take part in the collectives without Python (``shared_sums``).

Both rely on stores becoming visible in program order, as they do on x86-64 (``segment.py``
refuses other machines). Everything larger than a slot goes in pieces.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ekiden.core.errors import InvariantBroken, ReplicaFailed
from ekiden.parallel.communicator import Communicator, SharedSums, ordered_sum
from ekiden.parallel.pipeline import Pipeline
from ekiden.parallel.segment import Segment
from ekiden.parallel.shm_map import LINE, REASON, ShmMap
from ekiden.parallel.waiting import Patience


class Failures:
    """Every rank's last word: set once by the rank that gives up, read by all who wait."""

    def __init__(self, segment: Segment, layout: ShmMap, rank: int) -> None:
        size = layout.tp * layout.pp
        self._flags = segment.words(layout.failures, size * LINE // 8)
        self._texts = segment.text(layout.reasons, size * REASON)
        self._rank = rank

    def report(self, reason: str) -> None:
        data = reason.encode()[:REASON].ljust(REASON, b"\0")
        self._texts[self._rank * REASON : (self._rank + 1) * REASON] = data
        self._flags[self._rank * LINE // 8] = 1  # after the text, which it vouches for

    def check(self) -> None:
        """Raise ReplicaFailed if a rank has given up."""
        for rank in range(len(self._flags) * 8 // LINE):
            if self._flags[rank * LINE // 8]:
                text = bytes(self._texts[rank * REASON : (rank + 1) * REASON])
                reason = text.rstrip(b"\0").decode(errors="replace")
                raise ReplicaFailed(f"rank {rank} gave up: {reason}")


class ShmCommunicator(Communicator):
    """One TP group's collectives."""

    def __init__(
        self,
        segment: Segment,
        layout: ShmMap,
        tp_rank: int,
        pp_rank: int,
        failures: Failures,
        patience: Patience,
    ) -> None:
        super().__init__(tp_rank, layout.tp)
        self._entered = segment.words(layout.counters(pp_rank), layout.tp * LINE // 8)
        self._slots = [
            [
                segment.bytes(layout.slot(pp_rank, parity, rank), layout.slot_bytes)
                for rank in range(layout.tp)
            ]
            for parity in range(2)
        ]
        self._slot_bytes = layout.slot_bytes
        self._failures = failures
        self._patience = patience
        self._books = array("q", [0] * 5)
        self._shared: SharedSums | None = SharedSums(
            entered=segment.bytes(layout.counters(pp_rank), layout.tp * LINE),
            slots=segment.bytes(layout.slot(pp_rank, 0, 0), 2 * layout.tp * layout.slot_bytes),
            slot_bytes=layout.slot_bytes,
            failures=segment.bytes(layout.failures, layout.tp * layout.pp * LINE),
            books=self._books,
            timeout_s=patience.timeout_s,
            counter=self.counter,
            absent=self._raise_absent,
        )

    def shared_sums(self) -> SharedSums | None:
        return self._shared

    def abort(self, reason: str) -> None:
        self._failures.report(reason)

    def close(self) -> None:
        self._slots.clear()
        self._shared = None

    def _sum(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        step = self._slot_bytes // x.element_size()
        for start in range(0, len(flat), step):
            piece = flat[start : start + step]
            slots = self._enter(piece.view(torch.uint8))
            self._wait(self._operation)
            parts = [slot[: piece.nbytes].view(x.dtype) for slot in slots]
            piece.copy_(ordered_sum(parts))
        return x

    def _collect(
        self, x: Tensor, shapes: Sequence[Sequence[int]], root: int | None
    ) -> list[Tensor] | None:
        mine = _as_bytes(x)
        reads = root is None or root == self.rank
        parts = [torch.empty(list(shape), dtype=x.dtype) for shape in shapes]
        flats = [_as_bytes(part) for part in parts]
        for start in range(0, max(len(flat) for flat in flats), self._slot_bytes):
            stop = start + self._slot_bytes
            slots = self._enter(mine[start:stop])
            if reads:
                self._wait(self._operation)
                for flat, slot in zip(flats, slots, strict=True):
                    flat[start:stop].copy_(slot[: len(flat[start:stop])])
        return parts if reads else None

    @property
    def _operation(self) -> int:
        """The last one entered, by Python or by a kernel."""
        return self._books[0]

    def _enter(self, data: Tensor) -> list[Tensor]:
        """Begin the next operation with ``data`` in this rank's slot; give back all slots."""
        self._wait(self._operation)  # so everyone has done with the operation before that
        self._books[0] += 1
        slots = self._slots[self._operation % 2]
        slots[self.rank][: len(data)].copy_(data)
        self._entered[self.rank * LINE // 8] = self._operation
        return slots

    def _wait(self, operation: int) -> None:
        entered, stride = self._entered, LINE // 8
        for rank in range(self.size):
            at = rank * stride
            # Bound now: the lambda runs before the loop goes on.
            if entered[at] < operation and not self._patience.until(
                lambda at=at: entered[at] >= operation,  # type: ignore[misc]
                self._failures.check,
            ):
                self._raise_absent(rank)

    def _raise_absent(self, rank: int) -> NoReturn:
        self._failures.check()
        raise ReplicaFailed(f"TP rank {rank} did not arrive within {self._patience.timeout_s:g} s")


class ShmPipeline(Pipeline):
    """One rank's two links."""

    def __init__(
        self,
        segment: Segment,
        layout: ShmMap,
        tp_rank: int,
        pp_rank: int,
        failures: Failures,
        patience: Patience,
    ) -> None:
        super().__init__(pp_rank, layout.pp)
        self._failures = failures
        before, after = pp_rank - 1, pp_rank
        self._before = None if self.is_first else Ring(segment, layout, tp_rank, before)
        self._after = None if self.is_last else Ring(segment, layout, tp_rank, after)
        self._patience = patience

    def abort(self, reason: str) -> None:
        self._failures.report(reason)

    def close(self) -> None:
        self._before = self._after = None

    def _send(self, x: Tensor) -> None:
        ring = self._after
        if ring is None:
            raise InvariantBroken("the pipeline is closed")
        data = _as_bytes(x)
        for start in range(0, len(data), ring.slot_bytes):
            self._until(ring.has_room, f"stage {self.rank + 1} took nothing")
            ring.put(data[start : start + ring.slot_bytes])

    def _recv(self, x: Tensor) -> Tensor:
        ring = self._before
        if ring is None:
            raise InvariantBroken("the pipeline is closed")
        data = _as_bytes(x)
        for start in range(0, len(data), ring.slot_bytes):
            self._until(ring.has_item, f"stage {self.rank - 1} sent nothing")
            ring.take(data[start : start + ring.slot_bytes])
        return x

    def _until(self, ready: Callable[[], bool], failure: str) -> None:
        if not self._patience.until(ready, self._failures.check):
            raise ReplicaFailed(f"pipeline {failure} within {self._patience.timeout_s:g} s")


class Ring:
    """The slots from one stage to the next; one writer, one reader."""

    def __init__(self, segment: Segment, layout: ShmMap, tp_rank: int, link: int) -> None:
        self.slot_bytes = layout.message_bytes
        self._depth = layout.depth
        base = layout.link(tp_rank, link)
        self._filled = segment.words(base, 1)
        self._emptied = segment.words(base + LINE, 1)
        self._sizes = segment.words(base + 2 * LINE, layout.depth)
        self._slots = [
            segment.bytes(layout.link_slot(tp_rank, link, i), layout.message_bytes)
            for i in range(layout.depth)
        ]

    def has_room(self) -> bool:
        return self._filled[0] - self._emptied[0] < self._depth

    def has_item(self) -> bool:
        return self._filled[0] > self._emptied[0]

    def put(self, data: Tensor) -> None:
        at = self._filled[0] % self._depth
        self._slots[at][: len(data)].copy_(data)
        self._sizes[at] = len(data)
        self._filled[0] += 1

    def take(self, out: Tensor) -> None:
        at = self._emptied[0] % self._depth
        if self._sizes[at] != len(out):
            raise InvariantBroken(
                f"a pipeline stage was sent {self._sizes[at]} bytes and expected {len(out)}"
            )
        out.copy_(self._slots[at][: len(out)])
        self._emptied[0] += 1


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
