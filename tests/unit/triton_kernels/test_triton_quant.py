"""Products with int8, int4 and e4m3 weights equal the product with the dequantised matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.layers.backends.triton import quant


def dequantised(codes: Tensor, scales_OG: Tensor, zeros_OG: Tensor | None) -> Tensor:
    """float64 [O, I] of codes [O, I]."""
    group = codes.shape[1] // scales_OG.shape[1]
    zeros = torch.zeros_like(scales_OG) if zeros_OG is None else zeros_OG
    shifted = codes.double() - zeros.double().repeat_interleave(group, 1)
    return shifted * scales_OG.double().repeat_interleave(group, 1)


def packed(codes: Tensor) -> Tensor:
    """Two codes a byte, the even column in the low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


@settings(max_examples=16, deadline=None)
@example(rows=1, outputs=40, groups=4, group=32, bits=4, zeros=True, dtype=torch.float32)
@example(rows=70, outputs=130, groups=2, group=64, bits=8, zeros=True, dtype=torch.float16)
@example(rows=2, outputs=8, groups=1, group=200, bits=8, zeros=False, dtype=torch.float32)
@given(
    rows=st.sampled_from([1, 5, 17]),
    outputs=st.sampled_from([8, 33]),
    groups=st.integers(2, 5),
    group=st.sampled_from([32, 96, 128]),
    bits=st.sampled_from([4, 8]),
    zeros=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_integer_weights_equal_their_dequantised_matrix(
    device: str, rows: int, outputs: int, groups: int, group: int, bits: int, zeros: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(rows + outputs + group)
    codes = torch.randint(0, 1 << bits, (outputs, groups * group), generator=generator).byte()
    scales = torch.rand(outputs, groups, generator=generator) * 0.01
    points = torch.randint(0, 1 << bits, (outputs, groups), generator=generator).byte()
    x = torch.randn(rows, groups * group, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    zeros_OG = points if zeros else None
    out = quant.quant_linear(
        x.to(device),
        (packed(codes) if bits == 4 else codes).to(device),
        scales.to(device),
        None if zeros_OG is None else zeros_OG.to(device),
        bias.to(device),
        kind=quant.INT4 if bits == 4 else quant.INT8,
    )
    expected = x.double() @ dequantised(codes, scales, zeros_OG).T + bias.double()
    step = 1e-4 if dtype == torch.float32 else 1e-2
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), expected, rtol=step, atol=step)


@pytest.mark.parametrize("inputs", [64, 200])
@pytest.mark.parametrize("rows", [1, 20])
def test_e4m3_weights_equal_their_dequantised_matrix(device: str, rows: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(24, inputs, generator=generator).mul(30).to(torch.float8_e4m3fn)
    scales, x = torch.rand(24, 1, generator=generator), torch.randn(rows, inputs)
    out = quant.quant_linear(
        x.to(device), weight.to(device), scales.to(device), None, None, kind=quant.FP8
    )
    expected = x.double() @ (weight.double() * scales.double()).T
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-3)


def test_the_inputs_may_be_split_over_programs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant, "choose_splits", lambda *_: 3)
    codes = torch.arange(8 * 320).reshape(8, 320).remainder(251).byte()
    scales, x = torch.full((8, 10), 0.02), torch.randn(2, 320)
    out = quant.quant_linear(
        x.to(device), codes.to(device), scales.to(device), None, None, kind=quant.INT8
    )
    expected = x.double() @ dequantised(codes, scales, None).T
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def test_groups_that_do_not_fit_are_refused(device: str) -> None:
    x, codes = torch.zeros(1, 96, device=device), torch.zeros(4, 96, device=device).byte()
    with pytest.raises(ValueError, match="multiple of 32"):
        quant.quant_linear(x, codes, torch.ones(4, 6, device=device), None, None, kind=quant.INT8)
    with pytest.raises(ValueError, match="does not take"):
        quant.quant_linear(
            x, codes[:, :64], torch.ones(4, 1, device=device), None, None, kind=quant.INT8
        )


def test_every_e4m3_byte_is_torchs_number(device: str) -> None:
    """By a product with the identity, one byte a column."""
    bytes_ = torch.arange(256).byte()
    bytes_[0x7F] = bytes_[0xFF] = 0  # NaN
    x = torch.eye(256, device=device)
    weight = bytes_[None].view(torch.float8_e4m3fn)
    out = quant.quant_linear(
        x, weight.to(device), torch.ones(1, 1, device=device), None, None, kind=quant.FP8
    )
    assert torch.equal(out.cpu()[:, 0], weight.float()[0])
