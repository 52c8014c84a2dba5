"""The vocabulary's two matrices, split by rows over the TP ranks.

Shapes: T tokens, R rows whose logits are wanted, C hidden size, V whole vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from ekiden.layers.ops import Linear
from ekiden.layers.site import Site
from ekiden.parallel.split import even_split


class VocabEmbedding:
    """Token ids [T] int64 to [T, C], whole on every rank; ``scale`` multiplies every row."""

    def __init__(self, weight: Tensor, start: int, scale: float, site: Site) -> None:
        self.weight = weight
        self.start = start
        self.scale = scale
        self.tp = site.tp
        self.ops = site.ops

    @classmethod
    def load(
        cls, site: Site, name: str, vocab: int, hidden: int, *, scale: float = 1.0
    ) -> VocabEmbedding:
        """Raises SetupError as the source does."""
        rows = even_split(vocab, site.tp.size)[site.tp.rank]
        return cls(site.source.take(name, (vocab, hidden), rows=rows), rows[0], scale, site)

    def __call__(self, tokens_T: Tensor) -> Tensor:
        hidden_TC = self.ops.embed(tokens_T, self.weight, self.start, self.scale)
        return hidden_TC if self.tp.size == 1 else self.ops.all_reduce(hidden_TC, self.tp)


class LmHead:
    """Hidden [R, C] to float32 logits [R, V] on TP rank 0; None on the other ranks.

    Columns from ``valid`` on are padding of the vocabulary: they are -inf, never sampled.
    """

    def __init__(self, linear: Linear, vocab: int, valid: int, soft_cap: float, site: Site) -> None:
        self.part = linear
        """[R, C] to this rank's columns of the raw logits, float32."""
        self.valid = valid
        self.soft_cap = soft_cap
        self.tp = site.tp
        self.sizes = [stop - start for start, stop in even_split(vocab, site.tp.size)]

    @classmethod
    def load(
        cls,
        site: Site,
        name: str,
        vocab: int,
        hidden: int,
        *,
        valid: int,
        soft_cap: float = 0.0,
    ) -> LmHead:
        """``soft_cap`` above 0 squashes logits into (-cap, cap). Raises as the source does."""
        rows = even_split(vocab, site.tp.size)[site.tp.rank]
        weight = site.source.head(name.removesuffix(".weight"), (vocab, hidden), rows=rows)
        return cls(site.ops.linear(weight, None, float_out=True), vocab, valid, soft_cap, site)

    @classmethod
    def tied(
        cls, site: Site, embedding: VocabEmbedding, vocab: int, *, valid: int, soft_cap: float = 0.0
    ) -> LmHead:
        """The head of a model whose head is its embedding."""
        weight = site.source.tied_head(embedding.weight)
        return cls(site.ops.linear(weight, None, float_out=True), vocab, valid, soft_cap, site)

    def whole(self, part_RV: Tensor) -> Tensor | None:
        """All columns on TP rank 0, capped and masked."""
        logits_RV = self.tp.gather(part_RV, self.sizes, dim=1)
        if logits_RV is None:
            return None
        if self.soft_cap:
            logits_RV = (logits_RV / self.soft_cap).tanh() * self.soft_cap
        logits_RV[:, self.valid :] = float("-inf")
        return logits_RV
