"""Paged attention in plain torch: gather the blocks of a group, attend, put the rows back.

Shapes: T tokens, N query heads, K KV heads, H = N / K query heads of a KV head, D head dim,
G sequences, Q queries each, M blocks, B block size, L keys. All of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.grouping import AttentionGroup


def paged_attention(
    q_TND: Tensor, cache: Tensor, layer: int, groups: list[AttentionGroup]
) -> Tensor:
    """Softmax attention of every row over its own sequence's cache, scaled by D ** -0.5.

    ``cache [blocks, K, layers, 2, B, D]`` already holds this step's keys and values.
    Returns [T, N, D] in ``q_TND``'s dtype; sums and softmax are float32 inside.
    """
    out_TND = torch.empty_like(q_TND)
    for group in groups:
        out_TND[group.rows] = _attend(q_TND[group.rows], cache, layer, group)
    return out_TND


def _attend(q_RND: Tensor, cache: Tensor, layer: int, group: AttentionGroup) -> Tensor:
    k_KGLD, v_KGLD = _gather(cache, layer, group)
    kv_heads, sequences, _, head_dim = k_KGLD.shape
    if group.query_len > 1:
        # One sequence. Query heads of a KV head share its keys through a stride of 0.
        q_KHQD = q_RND.reshape(len(q_RND), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        shape = (kv_heads, q_KHQD.shape[1], group.length, head_dim)
        out_KHQD = F.scaled_dot_product_attention(
            q_KHQD,
            k_KGLD.expand(shape),
            v_KGLD.expand(shape),
            attn_mask=group.visible_GQL,
            is_causal=group.causal,
        )
        return out_KHQD.permute(2, 0, 1, 3).flatten(1, 2)
    # One row a sequence: the query heads of a KV head are the rows of one matrix product.
    q_KGHD = q_RND.reshape(sequences, kv_heads, -1, head_dim).transpose(0, 1)
    out_KGHD = F.scaled_dot_product_attention(q_KGHD, k_KGLD, v_KGLD, attn_mask=group.visible_GQL)
    return out_KGHD.transpose(0, 1).reshape(sequences, -1, head_dim)


def _gather(cache: Tensor, layer: int, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    """This layer's keys and values of the group, each [K, G, L, D].

    The cache is seen as rows of one head's block, so one ``index_select`` copies whole rows
    and leaves heads outermost, as attention wants them.
    """
    _, kv_heads, layers, _, block_size, head_dim = cache.shape
    sequences, width = group.table_GM.shape
    heads_K = torch.arange(kv_heads, device=cache.device)
    kinds_2 = torch.arange(2, device=cache.device)
    rows_2K1 = (heads_K * layers + layer)[None, :, None] * 2 + kinds_2[:, None, None]
    rows_2KM = rows_2K1 + group.table_GM.flatten() * (kv_heads * layers * 2)
    kv = cache.view(-1, block_size * head_dim).index_select(0, rows_2KM.flatten())
    kv = kv.view(2, kv_heads, sequences, width * block_size, head_dim)[:, :, :, : group.length]
    if group.beyond_GL is not None:
        kv.masked_fill_(group.beyond_GL[:, :, None], 0)
    return kv[0], kv[1]
