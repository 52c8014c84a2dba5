"""Ranks over ``torch.distributed``: gloo between CPUs, NCCL between GPUs, on one host or many.

With gloo a sum is a gather and a sum in rank order, so that it has the same bits as the shared
memory's, which is tested against it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ekiden.core.errors import ReplicaFailed
from ekiden.parallel.communicator import Communicator, Solo, ordered_sum
from ekiden.parallel.mesh import Mesh
from ekiden.parallel.pipeline import Pipeline, SingleStage


def open_distributed(
    backend: str, tp: int, pp: int, rank: int, *, host: str, port: int, timeout_s: float, depth: int
) -> Mesh:
    """Join the mesh whose store listens at ``host:port``. Every rank must call it.

    Raises:
        ReplicaFailed: not all ranks came within ``timeout_s``.
    """
    timeout = timedelta(seconds=timeout_s)
    with _failures("joining the mesh"):
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=timeout
        )
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=tp * pp, timeout=timeout
        )
        # Every rank makes every group, in the same order, as torch.distributed demands.
        groups = [dist.new_group(range(p * tp, p * tp + tp), timeout=timeout) for p in range(pp)]
    pp_rank, tp_rank = divmod(rank, tp)
    return Mesh(
        tp=DistributedCommunicator(groups[pp_rank], tp_rank, tp) if tp > 1 else Solo(),
        pp=DistributedPipeline(tp, tp_rank, pp_rank, pp, depth) if pp > 1 else SingleStage(),
    )


class DistributedCommunicator(Communicator):
    """One TP group as a process group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = group

    def abort(self, reason: str) -> None:
        """Leave: the others see the connection break, or their deadline pass."""
        self.close()

    def close(self) -> None:
        _leave()

    def _sum(self, x: Tensor) -> Tensor:
        with _failures("all-reduce"):
            if x.device.type == "cuda":
                dist.all_reduce(x, group=self._group)
                return x
            return ordered_sum(self._gather_padded(x.view(-1), x.numel())).view(x.shape)

    def _collect(
        self, x: Tensor, shapes: Sequence[Sequence[int]], root: int | None
    ) -> list[Tensor] | None:
        counts = [torch.Size(shape).numel() for shape in shapes]
        with _failures("gather"):
            flats = self._gather_padded(x.view(-1), max(counts))
        if root not in (None, self.rank):
            return None
        return [
            flat[:count].view(list(shape))
            for flat, count, shape in zip(flats, counts, shapes, strict=True)
        ]

    def _gather_padded(self, flat: Tensor, length: int) -> list[Tensor]:
        """``torch.distributed`` gathers equal sizes only."""
        padded = torch.zeros(length, dtype=flat.dtype, device=flat.device)
        padded[: len(flat)] = flat
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return parts


class DistributedPipeline(Pipeline):
    """Point-to-point messages; at most ``depth`` are on their way."""

    def __init__(self, tp: int, tp_rank: int, pp_rank: int, pp: int, depth: int) -> None:
        super().__init__(pp_rank, pp)
        self._next = (pp_rank + 1) * tp + tp_rank
        self._previous = (pp_rank - 1) * tp + tp_rank
        self._depth = depth
        self._on_the_way: deque[tuple[dist.Work, Tensor]] = deque()

    def abort(self, reason: str) -> None:
        """Leave: the others see the connection break, or their deadline pass."""
        self.close()

    def close(self) -> None:
        self._on_the_way.clear()
        _leave()

    def _send(self, x: Tensor) -> None:
        with _failures("send to the next stage"):
            if len(self._on_the_way) >= self._depth:
                self._on_the_way.popleft()[0].wait()
            copy = x.clone()  # must outlive the send, whatever the caller does with x
            work = dist.isend(copy, self._next)
            if work is not None:
                self._on_the_way.append((work, copy))

    def _recv(self, x: Tensor) -> Tensor:
        with _failures("receive from the stage before"):
            dist.recv(x, self._previous)
        return x


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # DistError is one
        raise ReplicaFailed(f"{what} failed, another rank is gone or too late: {error}") from error


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
