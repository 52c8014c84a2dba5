"""Random paged batches, and attention over them done slowly in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from ekiden.layers.ops import AttentionKind


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """What an attention kernel is given. ``k_SLKD`` and ``v_SLKD`` are each sequence's own."""

    q_TND: Tensor
    cache: Tensor
    layer: int
    table_SM: Tensor
    lengths_S: Tensor
    query_starts: Tensor
    k_SLKD: list[Tensor]
    v_SLKD: list[Tensor]


def paged_case(
    lengths: list[tuple[int, int]],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> PagedCase:
    """Sequences of (cached, new) tokens in a cache of three layers that holds NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-(cached + new) // block_size) + 1 for cached, new in lengths]
    free = list(range(sum(widths) + 3))
    random.Random(seed).shuffle(free)
    shape = (len(free), kv_heads, 3, 2, block_size, head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    table_SM = torch.zeros((len(lengths), max(widths)), dtype=torch.int32)
    keys, values = [], []
    for s, (cached, new) in enumerate(lengths):
        blocks = [free.pop() for _ in range(widths[s])]
        table_SM[s, : widths[s]] = torch.tensor(blocks)
        k, v = torch.randn(2, cached + new, kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(cached + new):
            block, offset = blocks[position // block_size], position % block_size
            cache[block, :, 1, 0, offset], cache[block, :, 1, 1, offset] = k[position], v[position]
        keys.append(k)
        values.append(v)
    counts = torch.tensor([new for _, new in lengths])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32)
    q = torch.randn(int(starts[-1]), kv_heads * group, head_dim, generator=generator).to(dtype)
    return PagedCase(
        q_TND=q.to(device),
        cache=cache.to(device),
        layer=1,
        table_SM=table_SM.to(device),
        lengths_S=torch.tensor([sum(pair) for pair in lengths], dtype=torch.int32, device=device),
        query_starts=starts.to(device),
        k_SLKD=keys,
        v_SLKD=values,
    )


def attention_reference(case: PagedCase, kind: AttentionKind) -> Tensor:
    """One sequence, one query, one head at a time; float64 [T, N, D] on the CPU."""
    q_TND, starts = case.q_TND.cpu().double(), case.query_starts.tolist()
    out = torch.zeros_like(q_TND)
    for s, (k_LKD, v_LKD) in enumerate(zip(case.k_SLKD, case.v_SLKD, strict=True)):
        group = q_TND.shape[1] // k_LKD.shape[1]
        cached = len(k_LKD) - (starts[s + 1] - starts[s])
        for row in range(starts[s], starts[s + 1]):
            stop = cached + row - starts[s] + 1
            first = max(0, stop - kind.window) if kind.window else 0
            for head in range(q_TND.shape[1]):
                scores = k_LKD[first:stop, head // group].double() @ q_TND[row, head] * kind.scale
                if kind.soft_cap:
                    scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
                out[row, head] = scores.softmax(0) @ v_LKD[first:stop, head // group].double()
    return out
