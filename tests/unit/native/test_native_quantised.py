"""Native linears over 4- and 8-bit weights, against the same weights multiplied out in float64.

Shapes: M rows, K inputs, N outputs, G groups of a row of weights.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.backends.native.library import KernelFailed, Op, Pool
from ekiden.layers.backends.native.packed import (
    PackedQuantised,
    pack_quantised,
    quantised_linear_op,
)

ROWS = (1, 2, 3, 5, 6, 7, 13, 24, 40)
# (N, K, group): groups that leave a rest, of one row, of several of the kernel's, short of 16.
SHAPES = (
    (32, 128, 32),
    (33, 129, 64),
    (100, 576, 128),
    (31, 33, 4096),
    (40, 1000, 256),
    (45, 700, 700),
    (5, 1, 32),
    (64, 100, 8),
    (64, 100, 24),
)


class Weights(NamedTuple):
    packed: PackedQuantised
    exact_NK: Tensor
    """float64"""


def weights(
    bits: int, outputs: int, inputs: int, group: int, *, zeros: bool, seed: int = 1
) -> Weights:
    chance = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    q = torch.randint(0, 2**bits, (outputs, inputs), generator=chance).to(torch.uint8)
    scales = torch.rand(outputs, groups, generator=chance) / 2**bits
    zero = torch.randint(0, 2**bits, (outputs, groups), generator=chance).to(torch.uint8)
    middle = torch.full_like(zero, 2 ** (bits - 1))
    of_group = torch.arange(inputs) // group
    exact = q.double() - (zero if zeros else middle).double()[:, of_group]
    packed = pack_quantised(q, scales, zero if zeros else None, bits=bits, group_size=group)
    return Weights(packed, exact * scales.double()[:, of_group])


@pytest.fixture(scope="module")
def pools():
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pools = [Pool(threads) for threads in (1, 2, 3)]
    yield pools
    for pool in pools:
        pool.close()
    torch.set_num_threads(torch_threads)


def made(pool: Pool, packed: PackedQuantised, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, N] float32, written over numbers that would show where nothing was."""
    y = torch.full((x.shape[0], packed.outputs), 1e30)
    pool.run((Op * 1)(quantised_linear_op(packed, x, y, bias)))
    return y


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_equals_the_weights_multiplied_out(pools, bits, zeros, outputs, inputs, group):
    packed, exact = weights(bits, outputs, inputs, group, zeros=zeros)
    bias = random(2, outputs)
    for rows in (1, 3, 13):
        for dtype in (torch.float32, torch.bfloat16):
            x = random(rows, rows, inputs).to(dtype)
            expected = F.linear(x.double(), exact, bias.double())
            # Each activation is off by half a step at most: 2 ** -16 of its group's largest.
            steps = x.abs().amax(1, keepdim=True).double() / 32512
            bound = steps / 2 * exact.abs().sum(1) + 1e-6 * F.linear(x.double().abs(), exact.abs())
            error = (made(pools[1], packed, x, bias).double() - expected).abs()
            assert (error <= bound + 1e-6).all(), f"{rows} rows"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(pools, bits, outputs, inputs, group):
    packed, _ = weights(bits, outputs, inputs, group, zeros=True)
    x = random(3, 40, inputs).bfloat16()
    one_by_one = torch.cat([made(pools[0], packed, x[i : i + 1]) for i in range(40)])
    for pool in pools:
        for rows in ROWS:
            assert torch.equal(made(pool, packed, x[:rows]), one_by_one[:rows]), f"{rows} rows"


def test_many_rows_are_computed_in_chunks_and_stay_the_same(pools):
    # 192 rows are quantised at once; 500 take three turns of 166 and 167.
    packed, _ = weights(4, 40, 64, 32, zeros=False)
    x = random(1, 500, 64)
    parts = torch.cat([made(pools[0], packed, part) for part in x.split(50)])
    assert all(torch.equal(made(pool, packed, x), parts) for pool in pools)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_sums_do_not_overflow(pools, bits):
    top = 2**bits - 1
    q = torch.full((32, 256), top, dtype=torch.uint8)
    zero = torch.zeros(32, 1, dtype=torch.uint8)
    packed = pack_quantised(q, torch.ones(32, 1), zero, bits=bits, group_size=256)
    x = torch.cat([torch.ones(1, 256), -torch.ones(1, 256)])
    torch.testing.assert_close(made(pools[0], packed, x), top * 256.0 * x[:, :32])


def test_an_outlier_dims_its_own_group_only(pools):
    q = random(1, 32, 256).mul(40).add(128).clamp(0, 255).to(torch.uint8)
    q[:, :128] = 128  # the zero point: the group of the outlier counts for nothing
    packed = pack_quantised(q, torch.full((32, 2), 1e-2), None, bits=8, group_size=128)
    x = random(2, 1, 256)
    x[0, 3] = 1e6
    expected = F.linear(x.double(), (q.double() - 128) * 1e-2)
    assert (made(pools[0], packed, x).double() - expected).abs().max() < 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_spoils_its_row_and_no_other(pools, bad):
    packed, _ = weights(4, 32, 64, 32, zeros=True)
    x = torch.ones(3, 64)
    x[1, 40] = bad
    y = made(pools[0], packed, x)
    assert not y[1].isfinite().any()
    assert torch.equal(y[0], y[2])
    assert y[0].isfinite().all()


def test_zeros_and_the_smallest_numbers_give_zero(pools):
    packed, _ = weights(4, 32, 64, 32, zeros=True)
    x = torch.zeros(2, 64)
    x[1] = 1e-44
    assert (made(pools[0], packed, x).abs() < 1e-35).all()


def test_rows_may_lie_apart_and_come_out_in_the_activations_dtype(pools):
    packed, _ = weights(8, 45, 65, 32, zeros=True)
    x = random(1, 9, 200).bfloat16()[:, 50:115]
    memory = torch.full((9, 80), 7.0).bfloat16()
    pools[1].run((Op * 1)(quantised_linear_op(packed, x, memory[:, 20:65])))
    assert torch.equal(memory[:, 20:65], made(pools[1], packed, x.contiguous()).bfloat16())
    assert (memory[:, :20] == 7).all()
    assert (memory[:, 65:] == 7).all()


@pytest.mark.parametrize(("bits", "most"), [(4, 4.32), (8, 8.32)])
def test_a_weight_takes_little_more_than_its_bits(bits, most):
    packed, _ = weights(bits, 64, 1024, 128, zeros=False)
    assert packed.panels.numel() * 8 / (64 * 1024) < most


@pytest.mark.parametrize(
    ("bits", "group", "scales", "says"),
    [
        (3, 32, (2, 2), "bits must be 4 or 8, not 3"),
        (4, 12, (2, 6), "group_size must be .* not 12"),
        (4, 0, (2, 1), "group_size must be .* not 0"),
        (4, 32, (2, 3), r"scales must be \[2, 2\], not \[2, 3\]"),
    ],
)
def test_what_no_kernel_takes_is_refused(bits, group, scales, says):
    q = torch.zeros(2, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=says):
        pack_quantised(q, torch.ones(scales), None, bits=bits, group_size=group)


def test_a_group_that_is_not_the_kernels_is_refused_above_128():
    q = torch.zeros(2, 400, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not 200"):
        pack_quantised(q, torch.ones(2, 2), None, bits=4, group_size=200)


def test_the_kernel_refuses_bits_it_does_not_know(pools):
    packed, _ = weights(4, 32, 64, 32, zeros=True)
    op = quantised_linear_op(packed, torch.ones(1, 64), torch.ones(1, 32))
    op.n[6] = 5
    with pytest.raises(KernelFailed, match=r"QUANTISED_LINEAR.*cannot take"):
        pools[1].run((Op * 1)(op))
