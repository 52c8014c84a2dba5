"""One rank's part of a decoder-only transformer, whatever its family, and one step of it.

Shapes: T tokens, C hidden size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ekiden.layers.attention import Attention
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.mlp import GatedMlp
from ekiden.layers.norm import RMSNorm
from ekiden.layers.ops import Ops
from ekiden.layers.rope import Rope, Rotation
from ekiden.layers.vocab import LmHead, VocabEmbedding
from ekiden.models.steps import StepInputs, Steps
from ekiden.parallel.mesh import Mesh


class Layer(Protocol):
    """One layer, which calls nothing but ``Ops``, so that a step can be recorded.

    What it adds to the residual stream is left to the next one's first norm.
    """

    def __call__(
        self,
        hidden_TC: Tensor,
        delta_TC: Tensor | None,
        rotations: Sequence[Rotation],
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream is hidden + delta, before and after. ``hidden_TC`` may be reused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderLayer:
    """Attention and MLP, each behind a norm and added to its input."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMlp
    rope: int
    """Which of the step's rotations is this layer's."""

    def __call__(
        self,
        hidden_TC: Tensor,
        delta_TC: Tensor | None,
        rotations: Sequence[Rotation],
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        normed_TC, hidden_TC = self.attention_norm.add(hidden_TC, delta_TC)
        attended_TC = self.attention(normed_TC, rotations[self.rope], batch, cache)
        normed_TC, hidden_TC = self.mlp_norm.add(hidden_TC, attended_TC)
        return hidden_TC, self.mlp(normed_TC)


class Decoder:
    """The layers of one stage, this rank's slice of each, and the ends where it has them."""

    def __init__(
        self,
        *,
        mesh: Mesh,
        ops: Ops,
        dtype: torch.dtype,
        hidden_size: int,
        max_blocks: int,
        ropes: Sequence[Rope],
        layers: Sequence[Layer],
        embedding: VocabEmbedding | None,
        norm: RMSNorm | None,
        head: LmHead | None,
    ) -> None:
        """``max_blocks`` is the longest block table of a sequence. Layers pick their rope."""
        self.mesh = mesh
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.ropes = ropes
        self.layers = layers
        self.embedding = embedding
        self.norm = norm
        self.head = head
        self._steps = Steps(ops, self._stage, max_blocks)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: Tensor) -> Tensor | None:
        """As ``ekiden.models.registry.Model.forward``; hand-over between stages included."""
        rotations = tuple(rope.rotation(batch.positions_T) for rope in self.ropes)
        outputs = self._steps.run(StepInputs(batch, rotations, self._receive(batch)), cache)
        if self.head is None:
            hidden_TC, delta_TC = outputs
            self.mesh.pp.send(hidden_TC + delta_TC)
            return None
        return self.head.whole(outputs[0]) if outputs else None

    def _receive(self, batch: ForwardBatch) -> Tensor | None:
        if self.embedding is not None:
            return None
        shape = (len(batch.tokens_T), self.hidden_size)
        return self.mesh.pp.recv(shape, self.dtype, batch.tokens_T.device)

    def _stage(self, inputs: StepInputs, cache: Tensor) -> tuple[Tensor, ...]:
        """(hidden, delta) for the next stage; on the last one this rank's logits, if any."""
        batch, rotations, entered_TC = inputs
        hidden_TC = entered_TC if self.embedding is None else self.embedding(batch.tokens_T)
        assert hidden_TC is not None, "a stage without an embedding is given its input"
        delta_TC: Tensor | None = None
        for layer in self.layers:
            hidden_TC, delta_TC = layer(hidden_TC, delta_TC, rotations, batch, cache)
        assert delta_TC is not None, "a stage has a layer at least"
        if self.norm is None or self.head is None:
            return hidden_TC, delta_TC
        if not len(batch.logit_rows_R):
            return ()
        if not batch.is_decode:
            hidden_TC, delta_TC = hidden_TC[batch.logit_rows_R], delta_TC[batch.logit_rows_R]
        normed_RC, _ = self.norm.add(hidden_TC, delta_TC)
        return (self.head.part(normed_RC),)
