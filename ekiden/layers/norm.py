"""Root mean square normalisation (arXiv:1910.07467).

Shapes: T tokens, C hidden size.
"""

from __future__ import annotations

from torch import Tensor

from ekiden.layers.ops import Ops
from ekiden.layers.site import Site


class RMSNorm:
    """Over the last dimension, computed in float32; any leading shape, same dtype out."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self.weight = weight.float()
        self.eps = eps
        self.ops = ops

    @classmethod
    def load(cls, site: Site, name: str, width: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        """``offset`` is added to the stored weight (Gemma stores it less one).

        Raises:
            SetupError: as ``TensorSource.take``.
        """
        weight = site.source.take(name, (width,)).float()
        # Where nothing is added nothing is computed: torch's first sum on the device ``meta``, with
        # which models are weighed, brings the compiler in, a second and a half.
        return cls(weight + offset if offset else weight, eps, site.ops)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.eps)

    def add(self, hidden_TC: Tensor, delta_TC: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum) of hidden + delta; ``hidden_TC`` may be overwritten."""
        if delta_TC is None:
            return self(hidden_TC), hidden_TC
        return self.ops.add_norm(hidden_TC, delta_TC, self.weight, self.eps)
