"""Plain torch: the reference of every fast backend, and what runs where there is none.

Shapes: T tokens, N query heads, K KV heads, H = N / K query heads of a KV head, D head dim,
G sequences, Q queries each, M blocks, B block size, L keys. All of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.cache.tensors import as_numbers, as_stored, write_kv
from ekiden.layers import width_norm
from ekiden.layers.batch import ForwardBatch
from ekiden.layers.grouping import AttentionGroup
from ekiden.layers.ops import AttentionKind, HeadNorm, HeadShape, Linear, WidthNorm
from ekiden.layers.quantised import dequantise
from ekiden.layers.rope import Rotation, rotate
from ekiden.layers.weights import DenseWeight, LinearWeight
from ekiden.parallel.communicator import Communicator

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class TorchOps:
    """Implements ``ekiden.layers.ops.Ops``."""

    name = "torch"

    def linear(
        self, weight: LinearWeight, bias: Tensor | None, *, float_out: bool = False
    ) -> Linear:
        return TorchLinear(weight, bias, float_out)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_norm(
        self, residual_TC: Tensor, x_TC: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total_TC = residual_TC + x_TC
        return self.norm(total_TC, weight, eps), total_TC

    def add(self, residual_TC: Tensor, x_TC: Tensor) -> Tensor:
        return residual_TC + x_TC

    def width_norm(self, qkv_TE: Tensor, norm: WidthNorm, tp: Communicator) -> Tensor:
        squares_T2 = self.all_reduce(width_norm.squares(qkv_TE, norm), tp)
        return width_norm.scale(qkv_TE, squares_T2, norm)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def rotate_and_store(
        self,
        qkv_TE: Tensor,
        shape: HeadShape,
        rotation: Rotation,
        cache: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        sizes = [shape.num_q, shape.num_kv, shape.num_kv]
        heads = qkv_TE.view(len(qkv_TE), -1, shape.head_dim)
        q_TND, k_TKD, v_TKD = torch.split(heads, sizes, dim=1)
        if shape.norm is not None:
            q_TND, k_TKD = self._norm_heads(q_TND, k_TKD, shape.norm)
        write_kv(cache, shape.layer, rotate(k_TKD, rotation), v_TKD, batch.slots_T)
        return rotate(q_TND, rotation)

    def _norm_heads(self, q_TND: Tensor, k_TKD: Tensor, norm: HeadNorm) -> tuple[Tensor, Tensor]:
        q_weight, k_weight, eps = norm
        return self.norm(q_TND, q_weight, eps), self.norm(k_TKD, k_weight, eps)

    def attend(
        self, q_TND: Tensor, cache: Tensor, layer: int, batch: ForwardBatch, kind: AttentionKind
    ) -> Tensor:
        out_TND = torch.empty_like(q_TND)
        for group in batch.groups(kind.window):
            out_TND[group.rows] = _attend(q_TND[group.rows], cache, layer, group, kind)
        return out_TND

    def embed(self, tokens_T: Tensor, table_VC: Tensor, first: int, scale: float = 1.0) -> Tensor:
        local_T = tokens_T - first
        elsewhere_T = (local_T < 0) | (local_T >= table_VC.shape[0])
        hidden_TC = F.embedding(local_T.masked_fill(elsewhere_T, 0), table_VC)
        hidden_TC = hidden_TC.masked_fill(elsewhere_T[:, None], 0)
        return hidden_TC if scale == 1.0 else hidden_TC * scale

    def all_reduce(self, x: Tensor, tp: Communicator) -> Tensor:
        return tp.all_reduce(x)

    def bucket(self, rows: int) -> int:
        return 0

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        run()
        return run


class TorchLinear:
    """One matrix. A quantised one is kept as float32: 4 bytes a weight, and exact."""

    def __init__(self, weight: LinearWeight, bias: Tensor | None, float_out: bool) -> None:
        self.plain = isinstance(weight, DenseWeight) and weight.scale is None
        self.values = weight.values if self.plain else dequantise(weight)
        self.bias = bias
        self.float_out = float_out

    def __call__(self, x_TI: Tensor) -> Tensor:
        x = x_TI if self.plain else x_TI.float()
        out = F.linear(x, self.values, None if self.bias is None else self.bias.to(x.dtype))
        return out.float() if self.float_out else out.to(x_TI.dtype)


def _attend(
    q_RND: Tensor, cache: Tensor, layer: int, group: AttentionGroup, kind: AttentionKind
) -> Tensor:
    k_KGLD, v_KGLD = _gather(cache, layer, group, q_RND.dtype)
    kv_heads, sequences, _, head_dim = k_KGLD.shape
    attend = _softmax_attention if not kind.soft_cap else _capped_attention
    if group.query_len > 1:
        # One sequence. Query heads of a KV head share its keys through a stride of 0.
        q_KHQD = q_RND.reshape(len(q_RND), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        shape = (kv_heads, q_KHQD.shape[1], group.length, head_dim)
        out_KHQD = attend(q_KHQD, k_KGLD.expand(shape), v_KGLD.expand(shape), group, kind)
        return out_KHQD.permute(2, 0, 1, 3).flatten(1, 2)
    # One row a sequence: the query heads of a KV head are the rows of one matrix product.
    q_KGHD = q_RND.reshape(sequences, kv_heads, -1, head_dim).transpose(0, 1)
    out_KGHD = attend(q_KGHD, k_KGLD, v_KGLD, group, kind)
    return out_KGHD.transpose(0, 1).reshape(sequences, -1, head_dim)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, kind: AttentionKind
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=group.visible_GQL, is_causal=group.causal, scale=kind.scale
    )


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, kind: AttentionKind
) -> Tensor:
    """Scores squashed by tanh before the softmax (Gemma 2, arXiv:2408.00118)."""
    scores = q.float() @ k.float().transpose(-1, -2) * kind.scale
    scores = (scores / kind.soft_cap).tanh() * kind.soft_cap
    visible = group.visible_GQL
    if group.causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _gather(
    cache: Tensor, layer: int, group: AttentionGroup, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """This layer's keys and values of the group in ``dtype``, each [K, G, L, D].

    The cache is seen as rows of one head's block, so one ``index_select`` copies whole rows
    and leaves heads outermost, as attention wants them.
    """
    _, kv_heads, layers, _, block_size, row = cache.shape
    sequences, width = group.table_GM.shape
    heads_K = torch.arange(kv_heads, device=cache.device)
    kinds_2 = torch.arange(2, device=cache.device)
    rows_2K1 = (heads_K * layers + layer)[None, :, None] * 2 + kinds_2[:, None, None]
    rows_2KM = rows_2K1 + group.table_GM.flatten() * (kv_heads * layers * 2)
    kv = as_stored(cache).view(-1, block_size * row).index_select(0, rows_2KM.flatten())
    kv = kv.view(2, kv_heads, sequences, width * block_size, row)[:, :, :, : group.length]
    if group.beyond_GL is not None:
        kv.masked_fill_(group.beyond_GL[:, :, None], 0)
    k_KGLD, v_KGLD = as_numbers(kv, cache.dtype, dtype)
    return k_KGLD, v_KGLD
