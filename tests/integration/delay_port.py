"""Ranks whose model only takes time: importing this in a rank puts it in the place of the real one.

A stage sleeps, so that processes on few cores do not take it from one another; everything else,
the links between stages, the plans and the results, is the real thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ekiden.engine import rank
from ekiden.engine.port import PortContext
from ekiden.layers.batch import ForwardBatch
from ekiden.parallel.mesh import Mesh

STAGE_S = 0.03
HIDDEN = 8


class DelayModel:
    """Each stage takes STAGE_S; the last one likes the token after the last."""

    def __init__(self, vocabulary: int, mesh: Mesh) -> None:
        self._vocabulary = vocabulary
        self._mesh = mesh

    def forward(self, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor | None:
        if self._mesh.is_first_stage:
            hidden_TC = batch.tokens_T[:, None].expand(-1, HIDDEN).float()
        else:
            hidden_TC = self._mesh.pp.recv((len(batch.tokens_T), HIDDEN), torch.float32)
        time.sleep(STAGE_S)
        if not self._mesh.is_last_stage:
            self._mesh.pp.send(hidden_TC)
            return None
        liked = (hidden_TC[batch.logit_rows_R, 0].long() + 1) % self._vocabulary
        return torch.nn.functional.one_hot(liked, self._vocabulary).float()


class NoPort:
    """A port that nobody uses: it is here to be imported."""

    def describe(self) -> bytes:
        return b"delay"

    def command(self, message: bytes) -> None:
        raise AssertionError(message)

    def chunks_finished(self, chunks: Any) -> None:
        raise AssertionError(chunks)

    def close(self) -> None:
        """Nothing is held."""


def delay(cache: Any, context: PortContext, emit: Callable[[bytes], None]) -> NoPort:
    return NoPort()


def _load(model: Any, config: Any, mesh: Mesh, *_: Any, **__: Any) -> DelayModel:
    return DelayModel(model.vocab_size, mesh)


vars(rank)["load_model"] = _load
