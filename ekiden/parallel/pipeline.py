"""The links between pipeline stages: each rank sends to the same TP rank of the next stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ekiden.core.errors import InvariantBroken
from ekiden.parallel.communicator import Counter


class Pipeline(ABC):
    """One rank's ends of the pipeline. Messages arrive in the order they were sent.

    ``received.seconds`` is what this stage waited for its input: the pipeline's bubble.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.sent = Counter()
        self.received = Counter()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def send(self, x: Tensor) -> None:
        """Give ``x`` to the next stage; blocks only while the link's buffers are full.

        Raises:
            ReplicaFailed: the next stage did not take it in time, or gave up.
        """
        if self.is_last:
            raise InvariantBroken("the last pipeline stage has nobody to send to")
        x = x.contiguous()
        with self.sent.measure(x):
            self._send(x)

    def recv(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The next tensor from the stage before, which must be of this shape and dtype.

        Raises:
            ReplicaFailed: nothing came in time, or the stage before gave up.
        """
        if self.is_first:
            raise InvariantBroken("the first pipeline stage has nobody to receive from")
        x = torch.empty(list(shape), dtype=dtype, device=device)
        with self.received.measure(x):
            return self._recv(x)

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Tell the neighbours that this rank gives up, so that they need not wait."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the links hold. Idempotent."""

    @abstractmethod
    def _send(self, x: Tensor) -> None: ...

    @abstractmethod
    def _recv(self, x: Tensor) -> Tensor:
        """Fill ``x``, or give back another tensor of its shape and dtype."""


class SingleStage(Pipeline):
    """A pipeline of one stage."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def abort(self, reason: str) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""

    def _send(self, x: Tensor) -> None:
        raise InvariantBroken("a pipeline of one stage sends nothing")

    def _recv(self, x: Tensor) -> Tensor:
        raise InvariantBroken("a pipeline of one stage receives nothing")
