"""What a packed matrix weighs is known before it is packed."""

import pytest
import torch
from torch import Tensor

from ekiden.layers.backends.native import packed
from ekiden.layers.quantised import quantise, quantise_e4m3
from ekiden.layers.weights import DenseWeight, GroupedWeight, LinearWeight


def held(weight: LinearWeight, dtype: torch.dtype) -> list[Tensor | None]:
    if isinstance(weight, DenseWeight):
        dense = packed.pack_dense(weight.values, weight.scale, dtype=dtype)
        return [dense.panels, dense.scale]
    size = weight.group_size if weight.scales.shape[1] > 1 else max(weight.shape[1], 128)
    numbers = packed.pack_quantised(
        weight.values, weight.scales, weight.zeros, bits=weight.bits, group_size=size
    )
    return [numbers.panels]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(64, 256, 128), (5, 96, 32), (33, 43, 43), (96, 512, 256)]
)
def test_the_size_is_foretold_to_the_byte(
    outputs: int, inputs: int, group: int, dtype: torch.dtype
) -> None:
    floats = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    whole: list[LinearWeight] = [
        DenseWeight(values=floats),
        quantise_e4m3(floats),
        quantise(floats, 8, group),
        quantise(floats, 4, group),
    ]
    for weight in whole:
        assert packed.packed_bytes(weight, dtype) == sum(
            tensor.nbytes for tensor in held(weight, dtype) if tensor is not None
        )


def test_it_is_foretold_without_numbers() -> None:
    weight = GroupedWeight(
        values=torch.empty(32, 128, dtype=torch.uint8, device="meta"),
        scales=torch.empty(32, 1, device="meta"),
        zeros=torch.empty(32, 1, dtype=torch.uint8, device="meta"),
        bits=4,
        group_size=128,
    )
    assert packed.packed_bytes(weight, torch.bfloat16) == 32 * (64 + 4 + 2)
