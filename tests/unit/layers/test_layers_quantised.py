"""Quantised matrices: what they stand for, how they are cut and joined, how they are multiplied."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.core.errors import SetupError
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.quantised import cut_columns, dequantise, quantise, quantise_e4m3
from ekiden.layers.weights import DenseWeight, GroupedWeight, LinearWeight, join

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grouped(
    outs: int = 6, ins: int = 128, size: int = 64, bits: int = 8, order: bool = False
) -> GroupedWeight:
    """Any numbers at all, not only those that rounding makes."""
    g = torch.Generator().manual_seed(outs + ins)
    top = 2**bits
    return GroupedWeight(
        values=torch.randint(0, top, (outs, ins), generator=g, dtype=torch.uint8),
        scales=torch.rand(outs, ins // size, generator=g),
        zeros=torch.randint(0, top, (outs, ins // size), generator=g, dtype=torch.uint8),
        bits=bits,
        group_size=size,
        order=torch.randperm(ins, generator=g) if order else None,
    )


def by_hand(weight: GroupedWeight) -> Tensor:
    outs, ins = weight.shape
    matrix = torch.zeros(outs, ins)
    for o in range(outs):
        for column in range(ins):
            group = column // weight.group_size
            number = int(weight.values[o, column]) - int(weight.zeros[o, group])
            i = column if weight.order is None else int(weight.order[column])
            matrix[o, i] = number * float(weight.scales[o, group])
    return matrix


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_stand_for_what_is_said(bits: int, order: bool) -> None:
    weight = grouped(bits=bits, order=order)
    torch.testing.assert_close(dequantise(weight), by_hand(weight), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "weight",
    [
        grouped(),
        grouped(bits=4, order=True),
        DenseWeight(values=random(6, 128).to(torch.float8_e4m3fn), scale=torch.rand(6)),
        DenseWeight(values=random(6, 128), scale=torch.rand(6)),
    ],
    ids=["int8", "int4-sorted", "fp8", "scaled"],
)
def test_a_product_is_that_of_the_dequantised_matrix(
    weight: LinearWeight, dtype: torch.dtype
) -> None:
    """Summed in float32 and rounded once, whatever the activations are."""
    x, bias = random(5, 128, seed=1).to(dtype), random(6, seed=2)
    exact = x.double() @ dequantise(weight).double().T + bias.double()
    float_out = TorchOps().linear(weight, bias, float_out=True)(x)
    out = TorchOps().linear(weight, bias)(x)
    assert float_out.dtype == torch.float32
    torch.testing.assert_close(float_out.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max())
    assert torch.equal(out, float_out.to(dtype))


@given(
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([8, 32, 128]),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    shift=st.sampled_from([-3.0, 0.0, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_no_element_is_off_by_more_than_its_step(
    bits: int, size: int, seed: int, scale: float, shift: float
) -> None:
    """Half a step for all but those beyond the clip, whose gain the others must have paid for."""
    x = (random(3, 2 * size, seed=seed) + shift) * scale
    weight = quantise(x, bits, size)
    steps = weight.scales.repeat_interleave(size, 1)
    error = (dequantise(weight) - x).abs()
    inside = (weight.values > (1 if bits == 8 else 0)) & (weight.values < 2**bits - 1)
    assert (error[inside] <= 0.502 * steps[inside]).all()
    plain_step = x.view(3, 2, size).abs().amax(-1).repeat_interleave(size, 1) * 2 / (2**bits - 2)
    assert error.square().sum() <= (plain_step / 2).square().sum()


def test_scales_are_numbers_that_float16_holds() -> None:
    weight = quantise(random(8, 256), 4, 64)
    assert torch.equal(weight.scales.half().float(), weight.scales)


def test_a_clip_is_taken_where_it_helps_and_only_there() -> None:
    """One far element costs all others a coarser step, unless it is cut off."""
    x = random(1, 128)
    x[0, 5] = 8 * x.abs().max()
    weight = quantise(x, 4, 128)
    reach = float(weight.scales) * 15
    assert reach < float(x.max() - x.min()) * 0.99
    even = torch.linspace(-1, 1, 128)[None]
    assert float(quantise(even, 8, 128).scales) == pytest.approx(1 / 127, rel=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(bits: int) -> None:
    x = random(4, 128)
    x[1] = 0
    x[2, 64:] = 0
    back = dequantise(quantise(x, bits, 64))
    assert not back[1].any()
    assert not back[2, 64:].any()


def test_e4m3_with_a_scale_an_output_is_within_an_eighth_of_two() -> None:
    x = random(8, 96)
    x[3] = 0
    weight = quantise_e4m3(x)
    assert weight.values.dtype == torch.float8_e4m3fn
    # Half of the last of 3 bits, and what lies under the least normal number.
    bound = x.abs() / 16 + x.abs().amax(1, keepdim=True) * 2**-9 / 448
    assert ((dequantise(weight) - x).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize(
    ("size", "columns"), [(64, (64, 192)), (64, (32, 160)), (256, (3, 77)), (16, (16, 48))]
)
def test_a_cut_matrix_stands_for_the_cut(size: int, columns: tuple[int, int]) -> None:
    weight = grouped(ins=256, size=size)
    cut = cut_columns(weight, columns, "w")
    assert torch.equal(dequantise(cut), dequantise(weight)[:, slice(*columns)])
    assert cut.group_size * cut.scales.shape[1] == columns[1] - columns[0]


def test_a_cut_that_leaves_crumbs_is_refused() -> None:
    with pytest.raises(SetupError, match=r"o_proj has a scale for every 64 inputs.*16 to 79.*32"):
        cut_columns(grouped(), (16, 80), "o_proj")


@pytest.mark.parametrize("kind", ["int8", "int4-sorted", "fp8", "floats"])
def test_joined_matrices_give_their_outputs_side_by_side(kind: str) -> None:
    def make(outs: int) -> LinearWeight:
        values = random(outs, 128, seed=outs)
        if kind == "fp8":
            return quantise_e4m3(values)
        if kind == "floats":
            return DenseWeight(values=values)
        bits = 8 if kind == "int8" else 4
        weight = grouped(outs, bits=bits)
        order = grouped(1, order=True).order if kind == "int4-sorted" else None
        return GroupedWeight(
            values=weight.values,
            scales=weight.scales,
            zeros=weight.zeros,
            bits=bits,
            group_size=64,
            order=order,
        )

    pieces = [make(outs) for outs in (6, 2, 3)]
    whole = dequantise(join(pieces))
    assert torch.equal(whole, torch.cat([dequantise(piece) for piece in pieces]))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (DenseWeight(values=random(2, 128)), "int8 in groups of 64; float32"),
        (grouped(size=32), "groups of 64; int8 in groups of 32"),
        (grouped(bits=4), "int8 in groups of 64; int4"),
        (grouped(order=True), "groups of 64; int8 in groups of 64, inputs sorted"),
    ],
)
def test_matrices_of_different_kinds_do_not_join(other: LinearWeight, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        join([grouped(), other])


def test_inputs_in_different_orders_do_not_join() -> None:
    with pytest.raises(SetupError, match="in different orders"):
        join([grouped(6, order=True), grouped(7, order=True)])
