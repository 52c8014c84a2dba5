"""Norms, gates, embedding and block copies on the device equal plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.backends.triton.blocks import gather_blocks, scatter_blocks
from ekiden.layers.backends.triton.embed import embed
from ekiden.layers.backends.triton.gated import gated
from ekiden.layers.backends.triton.norm import add_rms_norm, rms_norm

# The interpreter's exp overflows where the device's gives infinity, which is right.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(out: Tensor, expected: Tensor) -> None:
    """Equal but for the last places of the dtype, where sums ran in another order.

    The interpreter cuts to bfloat16 where the device rounds: two places for two roundings.
    """
    step = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}[expected.dtype]
    torch.testing.assert_close(out.cpu(), expected, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 576), (1, 64), (2, 3, 24)])
def test_rms_norm_equals_torch(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = rand(*shape, dtype=dtype), rand(shape[-1], seed=1)
    expected = F.rms_norm(x.float(), weight.shape, weight, 1e-5).to(dtype)
    close(rms_norm(x.to(device), weight.to(device), 1e-5), expected)


def test_rms_norm_reads_rows_with_a_stride(device: str) -> None:
    x, weight = rand(4, 50)[:, 3:35], rand(32, seed=1)
    expected = F.rms_norm(x, weight.shape, weight, 1e-5)
    close(rms_norm(x.to(device), weight.to(device), 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_normalises_the_rounded_sum(device: str, dtype: torch.dtype) -> None:
    x, residual, weight = rand(3, 80, dtype=dtype), rand(3, 80, dtype=dtype, seed=2), rand(80)
    total = x + residual
    normed, kept = add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-6)
    if device == "cuda" or dtype != torch.bfloat16:
        assert torch.equal(kept.cpu(), total)
    close(normed, F.rms_norm(total.float(), weight.shape, weight, 1e-6).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_equal_torch(device: str, dtype: torch.dtype, activation: str) -> None:
    x = rand(3, 2 * 1100, dtype=dtype) * 3
    gate, up = x.chunk(2, dim=-1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    close(gated(x.to(device), activation), active * up)


def test_an_unknown_gate_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="relu"):
        gated(rand(1, 4).to(device), "relu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 24.0])
def test_embedding_is_zero_where_another_rank_holds_the_token(
    device: str, dtype: torch.dtype, scale: float
) -> None:
    table, tokens = rand(10, 1030, dtype=dtype), torch.tensor([7, 4, 17, 16, 0, 12])
    out = embed(tokens.to(device), table.to(device), 7, scale).cpu()
    for row, token in zip(out, tokens.tolist(), strict=True):
        here = 7 <= token < 17
        expected = table[token - 7] * scale if here else torch.zeros(1030, dtype=dtype)
        if device == "cuda" or dtype != torch.bfloat16:
            assert torch.equal(row, expected)
        else:
            close(row, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_blocks_go_out_and_come_back(device: str, dtype: torch.dtype) -> None:
    cache = rand(9, 3, 4, 2, 4, 20).mul(50).to(dtype).to(device)
    part, blocks = cache[:, 1:, 1:3], torch.tensor([7, 0, 3], device=device)
    staged = torch.empty((3, *part.shape[1:]), dtype=dtype, device=device)
    gather_blocks(part, blocks, staged)
    assert torch.equal(staged, part[blocks])
    before, targets = cache.clone(), torch.tensor([2, 8, 5], device=device)
    scatter_blocks(staged, targets, part)
    before[targets, 1:, 1:3] = staged
    assert torch.equal(cache, before), "scatter wrote something else than its blocks"


def test_blocks_of_another_shape_are_refused(device: str) -> None:
    cache, blocks = torch.zeros(4, 2, 2, 2, 4, 8, device=device), torch.tensor([1], device=device)
    with pytest.raises(ValueError, match="do not fit"):
        gather_blocks(cache, blocks, torch.zeros(2, 2, 2, 2, 4, 8, device=device))
    with pytest.raises(ValueError, match="lies together"):
        gather_blocks(cache[..., :4], blocks, torch.zeros(1, 2, 2, 2, 4, 4, device=device))
