"""Rows of a quantised KV cache: the bytes, the scale behind them, and who may read what."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.cache.scaled import LARGEST, pack_rows, unpack_rows
from ekiden.cache.tensors import allocate_cache, copy_blocks, read_kv, write_kv

torch.set_num_threads(1)

KINDS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
HEAD = 12


def layout(dtype: str, *, layers: int = 3, heads: int = 2) -> KvLayout:
    whole = RankLayout(
        tp_rank=0, pp_rank=0, head_start=0, head_stop=heads, layer_start=0, layer_stop=layers
    )
    return KvLayout(
        dtype=dtype,
        block_size=16,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=HEAD,
        tp=1,
        pp=1,
        ranks=(whole,),
    )


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "width", "row_bytes"),
    [("float32", 12, 48), ("bfloat16", 12, 24), ("int8", 16, 16), ("fp8_e4m3", 16, 16)],
)
def test_a_layout_counts_the_scales(dtype: str, width: int, row_bytes: int) -> None:
    kv = layout(dtype)
    cache = allocate_cache(kv, 0, 5)
    assert kv.row_width == cache.shape[-1] == width
    assert cache.nbytes == 5 * kv.block_bytes(0) == 5 * 16 * kv.token_bytes()
    assert kv.token_bytes() == 3 * 2 * 2 * row_bytes


def test_int8_rows_are_the_nearest_bytes_by_hand() -> None:
    rows = random(200, HEAD) * torch.logspace(-6, 6, 200)[:, None]
    packed = pack_rows(rows, torch.int8).numpy()
    for row, stored in zip(rows.numpy(), packed, strict=True):
        scale = np.abs(row).max() / np.float32(127)
        assert stored[HEAD:].view(np.float32)[0] == scale
        assert np.array_equal(stored[:HEAD].view(np.int8), np.rint(row / scale).astype(np.int8))


def e4m3_numbers() -> np.ndarray:
    """All that an e4m3 byte can say, from the format's definition (OCP 8-bit floats)."""
    numbers = []
    for byte in range(256):
        exponent, fraction = byte >> 3 & 15, byte & 7
        size = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
        numbers.append(np.nan if byte & 127 == 127 else size * (-1 if byte & 128 else 1))
    return np.array(numbers)


def test_e4m3_rows_are_the_nearest_bytes_by_hand() -> None:
    numbers, rows = e4m3_numbers(), random(200, HEAD)
    packed = pack_rows(rows, torch.float8_e4m3fn).numpy()
    for row, stored in zip(rows.numpy(), packed, strict=True):
        scale = np.abs(row).max() / np.float32(448)
        assert stored[HEAD:].view(np.float32)[0] == scale
        away = np.abs(numbers[None, :] - (row / scale)[:, None])
        chosen = away[np.arange(HEAD), stored[:HEAD]]
        assert np.array_equal(chosen, np.nanmin(away, axis=1))


@given(
    kind=st.sampled_from(list(LARGEST)),
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_a_row_comes_back_within_its_step(
    kind: torch.dtype, seed: int, size: float, dtype: torch.dtype
) -> None:
    x = (random(7, HEAD, seed=seed) * size).to(dtype)
    back = unpack_rows(pack_rows(x, kind), kind, torch.float32)
    largest = x.float().abs().amax(-1, keepdim=True)
    if kind == torch.int8:
        bound = largest / 127 / 2
    else:
        bound = torch.maximum(x.float().abs() / 16, largest / 448 * 2**-10)
    assert ((back - x.float()).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize("kind", list(LARGEST))
def test_what_is_read_may_be_written_again_unchanged(kind: torch.dtype) -> None:
    """Recomputing or moving a block through float32 changes no byte."""
    packed = pack_rows(random(64, HEAD), kind)
    assert torch.equal(pack_rows(unpack_rows(packed, kind, torch.float32), kind), packed)


@pytest.mark.parametrize("kind", list(LARGEST))
def test_a_row_of_zeros_has_no_scale(kind: torch.dtype) -> None:
    assert not pack_rows(torch.zeros(2, HEAD), kind).any()
    assert not unpack_rows(torch.zeros(2, HEAD + 4, dtype=torch.uint8), kind, torch.float32).any()


@pytest.mark.parametrize("dtype", [*KINDS, "bfloat16"])
def test_a_slot_holds_its_token_and_no_other_slot_changes(dtype: str) -> None:
    cache = allocate_cache(layout(dtype), 0, 6)
    cache.view(torch.uint8).random_(0, 256)
    before = cache.view(torch.uint8).clone()
    k, v = random(5, 2, HEAD, seed=1), random(5, 2, HEAD, seed=2)
    slots = torch.tensor([4 * 16 + 14, 4 * 16 + 15, 16, 17, 18])
    write_kv(cache, 1, k, v, slots)
    k_back, v_back = read_kv(cache, 1, [4, 1], 19)
    for given_, back in ((k, k_back), (v, v_back)):
        error = (back[14:].float() - given_).abs()
        assert (error <= given_.abs().amax(-1, keepdim=True) / 16).all()
    changed = (cache.view(torch.uint8) != before).any(-1).nonzero().tolist()
    assert {(b, layer, offset) for b, _, layer, _, offset in changed} == {
        (int(s) // 16, 1, int(s) % 16) for s in slots
    }


@pytest.mark.parametrize("dtype", list(KINDS))
def test_a_copied_block_is_equal_to_the_bit(dtype: str) -> None:
    cache = allocate_cache(layout(dtype), 0, 4)
    cache.view(torch.uint8).random_(0, 256)
    before = cache.view(torch.uint8).clone()
    copy_blocks(cache, [(0, 1), (1, 2)])
    assert torch.equal(cache.view(torch.uint8), before[[0, 0, 1, 3]])


@pytest.mark.parametrize("kind", list(LARGEST))
def test_a_token_is_kept_the_same_whatever_it_is_written_with(kind: torch.dtype) -> None:
    x = random(9, HEAD)
    alone = torch.cat([pack_rows(row[None], kind) for row in x])
    assert torch.equal(alone, pack_rows(x, kind))
