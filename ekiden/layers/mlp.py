"""The gated feed-forward layer (SwiGLU and GeGLU, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor

from ekiden.layers.linear import ColumnLinear, RowLinear
from ekiden.layers.ops import Ops
from ekiden.layers.site import Site
from ekiden.parallel.split import even_split

WIDTHS_TOGETHER = 32
"""Inner widths that stay on one rank: a panel of the native kernels, the least group of inputs."""


class GatedMlp:
    """``down(act(gate(x)) * up(x))``; each TP rank holds some of the inner width."""

    def __init__(self, gate_up: ColumnLinear, down: RowLinear, activation: str, ops: Ops) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.ops = ops

    @classmethod
    def load(
        cls,
        site: Site,
        prefix: str,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        activation: str = "silu",
    ) -> GatedMlp:
        """Widths that do not divide are split unevenly. Raises SetupError as the source does."""
        mine = even_split(inner, site.tp.size, WIDTHS_TOGETHER)[site.tp.rank]
        pieces = [(f"{prefix}.{name}", inner, mine) for name in ("gate_proj", "up_proj")]
        return cls(
            ColumnLinear.load(site, pieces, hidden, bias=bias),
            RowLinear.load(site, f"{prefix}.down_proj", (hidden, inner), mine, bias=bias),
            activation,
            site.ops,
        )

    def __call__(self, hidden_TC: Tensor) -> Tensor:
        return self.down(self.ops.gated(self.gate_up(hidden_TC), self.activation))
