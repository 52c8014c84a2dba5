"""OLMo 2 (arXiv:2501.00656): norms behind attention and MLP, q and k normed over their width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ekiden.layers.attention import Attention
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.mlp import GatedMlp
from ekiden.layers.norm import RMSNorm
from ekiden.layers.ops import Ops
from ekiden.layers.rope import Rotation
from ekiden.layers.site import Site
from ekiden.models.config import ModelConfig
from ekiden.models.llama import load_attention, load_mlp
from ekiden.models.stage import load_norm


@dataclass(frozen=True, kw_only=True, eq=False)
class PostNormLayer:
    """Attention and MLP, each followed by a norm and then added to its input."""

    attention: Attention
    after_attention: RMSNorm
    mlp: GatedMlp
    after_mlp: RMSNorm
    ops: Ops

    def __call__(
        self,
        hidden_TC: Tensor,
        delta_TC: Tensor | None,
        rotations: Sequence[Rotation],
        batch: ForwardBatch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        hidden_TC = hidden_TC if delta_TC is None else self.ops.add(hidden_TC, delta_TC)
        attended_TC = self.attention(hidden_TC, rotations[0], batch, cache)
        hidden_TC = self.ops.add(hidden_TC, self.after_attention(attended_TC))
        return hidden_TC, self.after_mlp(self.mlp(hidden_TC))


def load_layer(model: ModelConfig, site: Site, index: int, local: int) -> PostNormLayer:
    prefix = f"model.layers.{index}"
    return PostNormLayer(
        attention=load_attention(model, site, index, local),
        after_attention=load_norm(model, site, f"{prefix}.post_attention_layernorm.weight"),
        mlp=load_mlp(model, site, index),
        after_mlp=load_norm(model, site, f"{prefix}.post_feedforward_layernorm.weight"),
        ops=site.ops,
    )
