"""Ranks as threads of one process: for tests, ``verify`` and engines without rank processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from ekiden.core.errors import InvariantBroken, ReplicaFailed
from ekiden.parallel.communicator import Communicator, Solo, ordered_sum
from ekiden.parallel.mesh import Mesh
from ekiden.parallel.pipeline import Pipeline, SingleStage

_DEPTH = 2
"""Micro-batches that a link holds for each stage of the pipeline."""


def local_meshes(tp: int, pp: int, timeout_s: float = 60.0) -> list[Mesh]:
    """A mesh for each of ``tp * pp`` threads, in order of rank. Thread r uses mesh r only."""
    stages = [_Group(tp, timeout_s) for _ in range(pp)]
    columns = [[_Link(_DEPTH * pp, timeout_s) for _ in range(pp - 1)] for _ in range(tp)]
    return [
        Mesh(
            tp=LocalCommunicator(stages[p], t) if tp > 1 else Solo(),
            pp=LocalPipeline(columns[t], p) if pp > 1 else SingleStage(),
        )
        for p in range(pp)
        for t in range(tp)
    ]


class _Group:
    """What the threads of one TP group share."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.slots: list[Tensor | None] = [None] * size
        self.arrivals = [0] * size
        self.timeout_s = timeout_s
        self.reason = ""


class LocalCommunicator(Communicator):
    """Every rank shows its tensor, all meet, all read, all meet again."""

    def __init__(self, group: _Group, rank: int) -> None:
        super().__init__(rank, len(group.slots))
        self._group = group

    def abort(self, reason: str) -> None:
        self._group.reason = f"TP rank {self.rank} gave up: {reason}"
        self._group.barrier.abort()

    def close(self) -> None:
        """Threads share memory that Python frees."""

    def _sum(self, x: Tensor) -> Tensor:
        total = ordered_sum(self._show(x))
        self._meet()
        return total

    def _collect(
        self, x: Tensor, shapes: Sequence[Sequence[int]], root: int | None
    ) -> list[Tensor] | None:
        parts = self._show(x)
        # Clones, since a rank may reuse its tensor as soon as all have met again.
        mine = [part.clone() for part in parts] if root in (None, self.rank) else None
        self._meet()
        return mine

    def _show(self, x: Tensor) -> list[Tensor]:
        self._group.slots[self.rank] = x
        self._meet()
        return [slot for slot in self._group.slots if slot is not None]

    def _meet(self) -> None:
        group = self._group
        group.arrivals[self.rank] += 1
        try:
            group.barrier.wait()
        except threading.BrokenBarrierError:
            raise ReplicaFailed(group.reason or self._absent()) from None

    def _absent(self) -> str:
        mine = self._group.arrivals[self.rank]
        late = [r for r, count in enumerate(self._group.arrivals) if count < mine]
        return f"TP ranks {late} did not arrive within {self._group.timeout_s:g} s"


class _Link:
    """A bounded queue from one stage to the next that either end can break."""

    def __init__(self, depth: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._depth = depth
        self._items: deque[Tensor] = deque()
        self._changed = threading.Condition()
        self._reason = ""

    def put(self, item: Tensor, peer: int) -> None:
        with self._changed:
            self._wait(lambda: len(self._items) < self._depth, f"stage {peer} took nothing")
            self._items.append(item)
            self._changed.notify_all()

    def get(self, peer: int) -> Tensor:
        with self._changed:
            self._wait(lambda: bool(self._items), f"stage {peer} sent nothing")
            self._changed.notify_all()
            return self._items.popleft()

    def abort(self, reason: str) -> None:
        with self._changed:
            self._reason = reason
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], failure: str) -> None:
        self._changed.wait_for(lambda: ready() or self._reason, self.timeout_s)
        if not ready():
            raise ReplicaFailed(self._reason or f"pipeline {failure} within {self.timeout_s:g} s")


class LocalPipeline(Pipeline):
    """``links[i]`` leads from stage i to stage i + 1."""

    def __init__(self, links: Sequence[_Link], rank: int) -> None:
        super().__init__(rank, len(links) + 1)
        self._before = links[rank - 1] if rank > 0 else None
        self._after = links[rank] if rank < len(links) else None

    def abort(self, reason: str) -> None:
        for link in (self._before, self._after):
            if link is not None:
                link.abort(f"pipeline stage {self.rank} gave up: {reason}")

    def close(self) -> None:
        """Threads share memory that Python frees."""

    def _send(self, x: Tensor) -> None:
        assert self._after is not None, "send() refuses on the last stage"
        # A clone, since the sender may reuse its tensor while the queue still holds it.
        self._after.put(x.clone(), peer=self.rank + 1)

    def _recv(self, x: Tensor) -> Tensor:
        assert self._before is not None, "recv() refuses on the first stage"
        message = self._before.get(peer=self.rank - 1)
        if message.shape != x.shape or message.dtype != x.dtype:
            raise InvariantBroken(
                f"stage {self.rank} expected {x.dtype} {list(x.shape)} and was sent "
                f"{message.dtype} {list(message.shape)}"
            )
        return message
