"""The rule by which KV is converted is what the engine writes of the same numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.cache.tensors import KV_TORCH_DTYPES, allocate_cache, read_kv, write_kv
from ekiden.verify.rule import bits_tensor, converted, tensor_bits

DTYPES = tuple(KV_TORCH_DTYPES)


def cache_of(dtype: str, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
    """One block of one layer with these keys and values."""
    tokens, heads, dim = k_TKD.shape
    rank = RankLayout(
        tp_rank=0, pp_rank=0, head_start=0, head_stop=heads, layer_start=0, layer_stop=1
    )
    layout = KvLayout(
        dtype=dtype, block_size=tokens, num_layers=1, num_kv_heads=heads, head_dim=dim,
        tp=1, pp=1, ranks=(rank,),
    )  # fmt: skip
    cache = allocate_cache(layout, 0, 1)
    write_kv(cache, 0, k_TKD, v_TKD, torch.arange(tokens))
    return cache


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 2**31), st.integers(-6, 6))
def test_converted_rows_are_those_that_the_engine_writes_of_the_same_numbers(
    source: str, target: str, seed: int, power: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn((2, 16, 2, 8), generator=generator) * 10.0**power
    numbers[0, 3] = 0.0
    cache = cache_of(source, *numbers)
    kept = read_kv(cache, 0, [0], 16, dtype=torch.float32)
    expected = tensor_bits(cache_of(target, *kept), target)
    assert np.array_equal(converted(tensor_bits(cache, source), source, target), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_and_elements_go_both_ways(dtype: str) -> None:
    cache = cache_of(dtype, *torch.randn((2, 16, 2, 8)))
    back = bits_tensor(tensor_bits(cache, dtype), dtype)
    assert back.dtype == cache.dtype
    assert torch.equal(back.view(torch.uint8), cache.view(torch.uint8))
