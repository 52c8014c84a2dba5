"""Every op of the seam gives on the Triton kernels what it gives in plain torch."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from dataclasses import replace

import pytest
import torch
from ops_cases import TINY, compare

from ekiden.layers.backends.triton.linear import FloatLinear, make_linear, pack_pairs
from ekiden.layers.quantised import dequantise, quantise

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, None),
        pytest.param(torch.float16, None, marks=pytest.mark.slow),
        pytest.param(torch.float32, torch.int8, marks=pytest.mark.slow),
        pytest.param(torch.float32, torch.float8_e4m3fn, marks=pytest.mark.slow),
    ],
)
def test_every_op_equals_plain_torch(
    device: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    differences = list(compare(device, dtype, TINY, kv_dtype))
    assert len(differences) >= 45
    assert [(name, worst) for name, worst in differences if worst >= 1] == []


def test_int4_packs_the_even_column_low() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_pairs(codes).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("bits", [8, 4])
def test_sorted_inputs_are_taken_in_their_order(device: str, bits: int) -> None:
    matrix = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    weight = replace(quantise(matrix, bits, 32), order=order)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    fields = {f.name: getattr(weight, f.name) for f in dataclass_fields(weight)}
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in fields.items()}
    out = make_linear(replace(weight, **moved), None, float_out=False)(x.to(device))
    torch.testing.assert_close(out.cpu(), x @ dequantise(weight).T, rtol=1e-5, atol=1e-5)


def test_groups_the_kernels_lack_are_multiplied_in_float_and_said(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight = quantise(torch.randn(8, 40), 8, 20)
    assert isinstance(make_linear(weight, None, float_out=False), FloatLinear)
    assert "every 20 inputs is multiplied in float" in caplog.text
