"""The gated feed-forward layer (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.linear import ColumnLinear, RowLinear
from ekiden.layers.weights import WeightSource
from ekiden.parallel.communicator import Communicator
from ekiden.parallel.split import even_split


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``; each TP rank holds some of the inner width."""

    def __init__(self, gate_up: ColumnLinear, down: RowLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    @classmethod
    def load(
        cls,
        source: WeightSource,
        prefix: str,
        hidden: int,
        inner: int,
        tp: Communicator,
        *,
        bias: bool,
    ) -> GatedMlp:
        """Widths that do not divide are split unevenly. Raises SetupError as the source does."""
        mine = even_split(inner, tp.size)[tp.rank]
        pieces = [(f"{prefix}.{name}", inner, mine) for name in ("gate_proj", "up_proj")]
        return cls(
            ColumnLinear.load(source, pieces, hidden, bias=bias),
            RowLinear.load(source, f"{prefix}.down_proj", (hidden, inner), mine, tp, bias=bias),
        )

    def __call__(self, hidden_TC: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden_TC).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
