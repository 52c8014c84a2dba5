"""The vocabulary's two matrices, split by rows over the TP ranks.

Shapes: T tokens, R rows whose logits are wanted, C hidden size, V whole vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.weights import WeightSource
from ekiden.parallel.communicator import Communicator
from ekiden.parallel.split import even_split


class VocabEmbedding:
    """Token ids [T] int64 to [T, C], whole on every rank."""

    def __init__(self, weight: Tensor, start: int, tp: Communicator) -> None:
        self.weight = weight
        self.start = start
        self.tp = tp

    @classmethod
    def load(
        cls, source: WeightSource, name: str, vocab: int, hidden: int, tp: Communicator
    ) -> VocabEmbedding:
        """Raises SetupError as the source does."""
        rows = even_split(vocab, tp.size)[tp.rank]
        return cls(source.take(name, (vocab, hidden), rows=rows), rows[0], tp)

    def __call__(self, tokens_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens_T, self.weight)
        local_T = tokens_T - self.start
        elsewhere_T = (local_T < 0) | (local_T >= self.weight.shape[0])
        hidden_TC = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.tp.all_reduce(hidden_TC.masked_fill(elsewhere_T[:, None], 0))


class LmHead:
    """Hidden [R, C] to float32 logits [R, V] on TP rank 0; None on the other ranks.

    Columns from ``valid`` on are padding of the vocabulary: they are -inf, never sampled.
    """

    def __init__(self, weight: Tensor, vocab: int, valid: int, tp: Communicator) -> None:
        self.weight = weight
        self.valid = valid
        self.tp = tp
        self.sizes = [stop - start for start, stop in even_split(vocab, tp.size)]

    @classmethod
    def load(
        cls,
        source: WeightSource,
        name: str,
        vocab: int,
        hidden: int,
        tp: Communicator,
        *,
        valid: int,
    ) -> LmHead:
        """Raises SetupError as the source does."""
        rows = even_split(vocab, tp.size)[tp.rank]
        return cls(source.take(name, (vocab, hidden), rows=rows), vocab, valid, tp)

    def __call__(self, hidden_RC: Tensor) -> Tensor | None:
        part_RV = F.linear(hidden_RC, self.weight)
        logits_RV = self.tp.gather(part_RV, self.sizes, dim=1)
        if logits_RV is None:
            return None
        logits_RV = logits_RV.to(torch.float32)
        logits_RV[:, self.valid :] = float("-inf")
        return logits_RV
