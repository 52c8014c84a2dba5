"""Decode steps as CUDA graphs: hundreds of launches replayed by one call.

All graphs take the memory of what lies between from one pool, for only one of them runs at a time.
Collectives are recorded like any kernel (NCCL allows it); a replay adds what it moves to the
counters of its groups, but no seconds: nobody waits for the device to measure it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ekiden.parallel.communicator import Communicator

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]

LARGEST = 512
"""Rows of the largest decode step that is recorded: beyond, the launches hide behind the work."""


def bucket_of(rows: int) -> int:
    """Rows with which to record: 1, 2, 4, 8, then in eights, from 128 on in thirty-twos.

    Rows of padding cost little, and there are 31 graphs at most.
    """
    if rows > LARGEST:
        return 0
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 128 else 32
    return -(-rows // step) * step


class Moved(NamedTuple):
    """One collective of a recording."""

    tp: Communicator
    nbytes: int


class Graphs:
    """Records steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._moved: list[Moved] | None = None

    def all_reduce(self, x: Tensor, tp: Communicator) -> Tensor:
        """``tp.all_reduce``; while a step is recorded, remembered for the counters."""
        if self._moved is None:
            return tp.all_reduce(x)
        calls, moved, seconds = tp.counter.calls, tp.counter.bytes, tp.counter.seconds
        out = tp.all_reduce(x)
        # Recording moves nothing: what the counter took for a call was none.
        tp.counter.calls, tp.counter.bytes, tp.counter.seconds = calls, moved, seconds
        self._moved.append(Moved(tp, x.nbytes))
        return out

    def record(self, run: Run) -> Run:
        """Run once as it is, which compiles and sizes everything, then record, then replay."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph, moved = torch.cuda.CUDAGraph(), list[Moved]()
        self._moved = moved
        try:
            # Other threads of the rank (the KV port) may go on using the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = run()
        finally:
            self._moved = None

        def replay() -> Outputs:
            graph.replay()
            for tp, nbytes in moved:
                tp.counter.calls += 1
                tp.counter.bytes += nbytes
            return outputs

        return replay
