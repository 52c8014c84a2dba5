"""What the tests of the native kernels share: whether there are any, pools, and paged batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from ekiden.cache.tensors import write_kv
from ekiden.layers.backends.native.build import NativeUnavailable, check_cpu
from ekiden.layers.backends.native.library import Op, Pool, load
from ekiden.layers.backends.native.ops import NativeOps
from ekiden.layers.batch import ForwardBatch, Span

LAYERS = 2
LAYER = 1


def why_not() -> str:
    """Why this machine has no native kernels; one that could have them must build them."""
    try:
        check_cpu()
    except NativeUnavailable as error:
        return str(error)
    load()
    return ""


needs_native = pytest.mark.skipif(bool(why_not()), reason=f"no native kernels: {why_not()}")


@cache
def pool(threads: int) -> Pool:
    return Pool(threads)


@cache
def native(dtype: torch.dtype, threads: int = 1) -> NativeOps:
    return NativeOps(dtype, threads)


def run(op: Op, threads: int = 1) -> None:
    pool(threads).run((Op * 1)(op))


class PagedBatch:
    """Sequences of (cached, new) tokens whose keys and values lie in shuffled blocks of NaN.

    ``q_TND``, ``k_LKD`` and ``v_LKD`` (a list, by sequence) are the numbers, in ``dtype``.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        kv_heads: int,
        group: int,
        dim: int,
        dtype: torch.dtype,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        counts = [-(-(cached + new) // block_size) for cached, new in lengths]
        self.cache = broken_cache(sum(counts) + 2, kv_heads, block_size, dim, kv_dtype or dtype)
        free = list(range(sum(counts) + 2))
        random.Random(seed).shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.lengths = list(lengths)
        self.q_TND = normal(sum(new for _, new in lengths), kv_heads * group, dim)
        self.k_LKD = [normal(cached + new, kv_heads, dim) for cached, new in lengths]
        self.v_LKD = [normal(cached + new, kv_heads, dim) for cached, new in lengths]
        for table, k, v in zip(self.tables, self.k_LKD, self.v_LKD, strict=True):
            whole = ForwardBatch.build([Span([0] * len(k), 0, table, 0)], block_size)
            write_kv(self.cache, LAYER, k, v, whole.slots_T)
        self.batch = self.part(self.lengths)

    def part(self, lengths: Sequence[tuple[int, int]]) -> ForwardBatch:
        """A batch over the same cache: the first tables, with other (cached, new)."""
        spans = [
            Span([0] * new, cached, table, 0)
            for (cached, new), table in zip(lengths, self.tables, strict=False)
        ]
        return ForwardBatch.build(spans, self.cache.shape[4])


def broken_cache(
    blocks: int, kv_heads: int, block_size: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """Every number that nobody writes is NaN; where rows are quantised, every scale."""
    row = dim + 4 if dtype.itemsize == 1 else dim
    cache = torch.zeros((blocks, kv_heads, LAYERS, 2, block_size, row), dtype=dtype)
    if dtype.itemsize == 1:
        cache.view(torch.uint8)[...] = 0xFF
    else:
        cache.fill_(float("nan"))
    return cache
