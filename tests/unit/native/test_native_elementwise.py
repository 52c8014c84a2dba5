"""Norms, gates, rotation, cache rows and embeddings equal plain torch, its roundings too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.cache.tensors import as_stored
from ekiden.layers.backends.native.library import KernelFailed
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.batch import ForwardBatch, Span
from ekiden.layers.ops import HeadNorm, HeadShape
from ekiden.layers.rope import Rope, plain_frequencies
from tests.unit.native.native_rig import LAYER, broken_cache, native, needs_native

pytestmark = needs_native

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.sampled_from([1, 15, 16, 31, 64, 100, 576, 2048])
ROWS = st.integers(1, 9)
THREADS = st.integers(1, 3)
torch_ops = TorchOps()


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Equal, but for the last bit where float32 sums ran in another order."""
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    step = 2.0**-7 if out.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(out.float(), expected.float(), rtol=step, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, width=WIDTHS, dtype=DTYPES, threads=THREADS, gap=st.sampled_from([0, 5]))
def test_norm_and_add_norm_equal_plain_torch(
    rows: int, width: int, dtype: torch.dtype, threads: int, gap: int
) -> None:
    ops = native(dtype, threads)
    weight = normal(width, dtype=torch.float32, seed=1)
    x, residual = (normal(rows, width + gap, dtype=dtype, seed=s)[:, :width] for s in (2, 3))
    assert_near(ops.norm(x, weight, 1e-5), torch_ops.norm(x, weight, 1e-5))
    expected, expected_sum = torch_ops.add_norm(residual, x, weight, 1e-5)
    out, total = ops.add_norm(residual, x, weight, 1e-5)
    assert_near(out, expected)
    assert torch.equal(total, expected_sum)


def test_a_row_s_norm_has_the_same_bits_alone_and_in_a_batch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = normal(7, 100, dtype=dtype), normal(100, dtype=torch.float32)
        whole = native(dtype, 3).norm(x, weight, 1e-5)
        alone = [native(dtype).norm(x[i : i + 1], weight, 1e-5) for i in range(7)]
        assert torch.equal(torch.cat(alone), whole)


def test_norm_takes_any_leading_shape() -> None:
    x, weight = normal(3, 4, 24, dtype=torch.float32), normal(24, dtype=torch.float32)
    assert_near(native(x.dtype).norm(x, weight, 1e-6), torch_ops.norm(x, weight, 1e-6))


@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS,
    width=WIDTHS,
    dtype=DTYPES,
    threads=THREADS,
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)
def test_gates_equal_plain_torch(
    rows: int, width: int, dtype: torch.dtype, threads: int, activation: str
) -> None:
    x = normal(rows, 2 * width, dtype=dtype)
    out, expected = native(dtype, threads).gated(x, activation), torch_ops.gated(x, activation)
    # An activation that is rounded the other way moves the product by as much again.
    step = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.float(), expected.float(), rtol=step, atol=1e-5)


def test_a_gate_is_rounded_before_it_is_multiplied() -> None:
    """As plain torch does: nearly every product has the same bits, a third would not otherwise."""
    x = normal(20, 2000, dtype=torch.bfloat16)
    for activation in ("silu", "gelu_tanh"):
        out = native(torch.bfloat16).gated(x, activation)
        assert (out == torch_ops.gated(x, activation)).float().mean() > 0.98


def test_gates_are_right_far_out_and_let_broken_numbers_show() -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 90.0, -90.0, 200.0, -200.0, float("nan")])
    x = torch.cat((gate, torch.ones(8)))[None]
    for activation in ("silu", "gelu_tanh"):
        out = native(torch.float32).gated(x, activation)
        expected = torch_ops.gated(x, activation)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(
    width=WIDTHS,
    dtype=DTYPES,
    threads=THREADS,
    first=st.sampled_from([0, 5]),
    scale=st.sampled_from([1.0, 24.0, 33.94112549695428]),
)
def test_embedding_rows_equal_plain_torch_bit_for_bit(
    width: int, dtype: torch.dtype, threads: int, first: int, scale: float
) -> None:
    table = normal(11, width, dtype=dtype)
    tokens = torch.tensor([first, first + 10, 0, 40, first + 3, first - 1])
    out = native(dtype, threads).embed(tokens, table, first, scale)
    assert torch.equal(out, torch_ops.embed(tokens, table, first, scale))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 6),
    num_q=st.integers(1, 4),
    num_kv=st.integers(1, 3),
    dim=st.sampled_from([4, 32, 48, 64, 128, 256]),
    rotated=st.sampled_from([1.0, 0.5]),
    normed=st.booleans(),
    dtype=DTYPES,
    kv_dtype=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    threads=THREADS,
)
def test_rotated_heads_and_cache_bytes_equal_plain_torch(
    tokens: int,
    num_q: int,
    num_kv: int,
    dim: int,
    rotated: float,
    normed: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    threads: int,
) -> None:
    norm = None
    if normed:
        weights = (normal(dim, dtype=torch.float32, seed=s) for s in (1, 2))
        norm = HeadNorm(*weights, 1e-6)
    shape = HeadShape(num_q, num_kv, dim, LAYER, norm)
    batch = ForwardBatch.build([Span([0] * tokens, 13, [3, 1], 0)], 16)
    rotation = Rope(plain_frequencies(1000.0, int(dim * rotated))).rotation(batch.positions_T)
    qkv = normal(tokens, (num_q + 2 * num_kv) * dim, dtype=dtype)
    caches = [broken_cache(5, num_kv, 16, dim, kv_dtype or dtype) for _ in range(2)]
    expected_q = torch_ops.rotate_and_store(qkv.clone(), shape, rotation, caches[0], batch)
    q = native(dtype, threads).rotate_and_store(qkv, shape, rotation, caches[1], batch)
    if not normed:  # the same products and sums in the same order: the same bits
        assert torch.equal(q, expected_q)
        assert torch.equal(*(as_stored(c).view(torch.uint8) for c in caches))
        return
    assert_near(q, expected_q)
    if kv_dtype is None:
        for part in (0, 1):
            expected, out = (c[[3, 1], :, LAYER, part].float() for c in caches)
            torch.testing.assert_close(out, expected, rtol=2.0**-7, atol=2e-2, equal_nan=True)


def test_a_token_without_a_slot_is_rotated_and_not_stored() -> None:
    shape = HeadShape(2, 1, 16, LAYER, None)
    batch = ForwardBatch.build([Span([0] * 3, 0, [0], 0)], 16)
    rotation = Rope(plain_frequencies(1000.0, 16)).rotation(batch.positions_T)
    qkv = normal(3, 64, dtype=torch.float32)
    cache = broken_cache(1, 1, 16, 16, torch.float32)
    whole = native(torch.float32).rotate_and_store(qkv, shape, rotation, cache, batch)
    assert cache[0, 0, LAYER, :, :3].isfinite().all()
    expected = cache.clone()
    expected[0, 0, LAYER, :, 1] = float("nan")
    cache.fill_(float("nan"))
    batch.slots_T[1] = -1
    q = native(torch.float32).rotate_and_store(qkv, shape, rotation, cache, batch)
    assert torch.equal(q, whole)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def test_a_slot_that_the_cache_does_not_have_is_refused() -> None:
    shape = HeadShape(2, 1, 16, LAYER, None)
    batch = ForwardBatch.build([Span([0], 0, [2], 0)], 16)
    rotation = Rope(plain_frequencies(1000.0, 16)).rotation(batch.positions_T)
    cache = broken_cache(2, 1, 16, 16, torch.float32)
    with pytest.raises(KernelFailed, match="argument"):
        native(torch.float32).rotate_and_store(
            normal(1, 64, dtype=torch.float32), shape, rotation, cache, batch
        )


def test_quantised_rows_at_the_ends_of_their_range_equal_plain_torch() -> None:
    """Zeros, one huge and tiny numbers, halves that round to even, subnormal bytes."""
    steps = torch.cat((torch.arange(-448, 449) / 448, torch.linspace(0, 2.0**-14, 150)))
    rows = [torch.zeros(16), torch.full((16,), 1e-40), torch.tensor([1e30, *[1e-30] * 15])]
    rows += list(steps[: len(steps) // 15 * 15].view(-1, 15))
    values = torch.stack([torch.cat((r, torch.ones(1)))[:16] if len(r) < 16 else r for r in rows])
    shape = HeadShape(1, 1, 16, LAYER, None)
    blocks = list(range(-(-len(values) // 16)))
    batch = ForwardBatch.build([Span([0] * len(values), 0, blocks, 0)], 16)
    rotation = Rope(plain_frequencies(1000.0, 0)).rotation(batch.positions_T)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        qkv = values.repeat(1, 3)
        caches = [broken_cache(len(blocks), 1, 16, 16, kv_dtype) for _ in range(2)]
        torch_ops.rotate_and_store(qkv, shape, rotation, caches[0], batch)
        native(torch.float32).rotate_and_store(qkv, shape, rotation, caches[1], batch)
        assert torch.equal(*(c.view(torch.uint8) for c in caches))
