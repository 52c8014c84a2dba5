"""Gemma 2 (arXiv:2408.00118) and the text model of Gemma 3 (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ekiden.layers.attention import Attention
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.mlp import GatedMlp
from ekiden.layers.norm import RMSNorm
from ekiden.layers.rope import Rotation
from ekiden.layers.site import Site
from ekiden.models.config import ModelConfig
from ekiden.models.llama import load_attention, load_mlp
from ekiden.models.stage import load_norm, rope_of


@dataclass(frozen=True, kw_only=True, eq=False)
class SandwichLayer:
    """Attention and MLP, each between two norms and then added to its input."""

    before_attention: RMSNorm
    attention: Attention
    after_attention: RMSNorm
    before_mlp: RMSNorm
    mlp: GatedMlp
    after_mlp: RMSNorm
    rope: int

    def __call__(
        self,
        hidden_TC: Tensor,
        delta_TC: Tensor | None,
        rotations: Sequence[Rotation],
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        normed_TC, hidden_TC = self.before_attention.add(hidden_TC, delta_TC)
        attended_TC = self.attention(normed_TC, rotations[self.rope], batch, cache)
        normed_TC, hidden_TC = self.before_mlp.add(hidden_TC, self.after_attention(attended_TC))
        return hidden_TC, self.after_mlp(self.mlp(normed_TC))


def load_layer(model: ModelConfig, site: Site, index: int, local: int) -> SandwichLayer:
    def norm(name: str) -> RMSNorm:
        return load_norm(model, site, f"model.layers.{index}.{name}_layernorm.weight")

    return SandwichLayer(
        before_attention=norm("input"),
        attention=load_attention(model, site, index, local),
        after_attention=norm("post_attention"),
        before_mlp=norm("pre_feedforward"),
        mlp=load_mlp(model, site, index),
        after_mlp=norm("post_feedforward"),
        rope=rope_of(model, index),
    )
