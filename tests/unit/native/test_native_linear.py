"""Dense native linears: right, and the same whatever else is computed and by how many threads.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.backends.native.library import KernelFailed, Op, Pool
from ekiden.layers.backends.native.packed import PackedDense, linear_op, pack_dense

DTYPES = (torch.float32, torch.bfloat16)
# (N, K): odd K, N that fills no panel, K past one block of steps (2048, two inputs each in bf16).
SHAPES = ((32, 64), (1, 1), (33, 2), (45, 33), (100, 129), (576, 576), (31, 2050), (40, 4500))
ROWS = (1, 2, 3, 5, 8, 11, 12, 13, 24, 25, 40)


@pytest.fixture(scope="module")
def pools():
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pools = [Pool(threads) for threads in (1, 2, 3)]
    yield pools
    for pool in pools:
        pool.close()
    torch.set_num_threads(torch_threads)


def run(pool: Pool, packed: PackedDense, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    pool.run((Op * 1)(linear_op(packed, x, y, bias)))
    return y


def made(pool: Pool, packed: PackedDense, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, N] float32, written over numbers that would show where nothing was."""
    return run(pool, packed, x, torch.full((x.shape[0], packed.outputs), 1e30), bias)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_equals_float64_for_any_number_of_rows(pools, dtype, outputs, inputs):
    weight, bias = random(1, outputs, inputs).to(dtype), random(2, outputs)
    packed = pack_dense(weight)
    for rows in ROWS:
        x = random(100 + rows, rows, inputs).to(dtype)
        expected = F.linear(x.double(), weight.double(), bias.double())
        # Products are exact, or nearly; what is left is the rounding of a chain of float32 sums.
        sizes = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
        error = ((made(pools[1], packed, x, bias).double() - expected).abs() / sizes).max()
        assert error < 2**-24 * (2 + inputs**0.5), f"{rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(pools, dtype, outputs, inputs):
    weight, x = random(1, outputs, inputs).to(dtype), random(2, 40, inputs).to(dtype)
    packed = pack_dense(weight)
    one_by_one = torch.cat([made(pools[0], packed, x[i : i + 1]) for i in range(40)])
    for pool in pools:
        for rows in ROWS:
            assert torch.equal(made(pool, packed, x[:rows]), one_by_one[:rows]), f"{rows} rows"


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(500, 70, 40), (1000, 33, 4500)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_are_computed_in_chunks_and_stay_the_same(pools, dtype, rows, outputs, inputs):
    # 500 rows are 3 chunks of a load; of 4,500 inputs, a load has 932 rows in bfloat16, 466 in
    # float32, and a chunk's sums rest in memory between two blocks of steps.
    weight, x = random(1, outputs, inputs).to(dtype), random(2, rows, inputs).to(dtype)
    packed = pack_dense(weight)
    parts = torch.cat([made(pools[0], packed, part) for part in x.split(100)])
    assert all(torch.equal(made(pool, packed, x), parts) for pool in pools)


def test_every_operation_of_a_list_deals_all_its_work(pools):
    # The counters by which threads take turns are used again by the next operation.
    packed, x = pack_dense(random(1, 100, 64)), random(2, 40, 64)
    expected = made(pools[0], packed, x)
    for pool in pools:
        outputs = [torch.full((40, 100), 1e30) for _ in range(20)]
        pool.run((Op * 20)(*(linear_op(packed, x, y) for y in outputs)))
        assert all(torch.equal(y, expected) for y in outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_torch_in_the_activations_dtype(pools, dtype):
    weight, x = random(1, 100, 576).to(dtype), random(2, 512, 576).to(dtype)
    y = run(pools[1], pack_dense(weight), x, torch.empty(512, 100, dtype=dtype), None)
    # One unit in the last place of bfloat16 is 2 ** -8 of the value.
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y, F.linear(x, weight), rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 30])
def test_rows_may_lie_apart_and_nothing_between_them_is_touched(pools, dtype, rows):
    x = random(1, rows, 200).to(dtype)[:, 50:115]
    weight = random(2, 45, 65).to(dtype)
    memory = torch.full((rows, 80), 7.0, dtype=dtype)
    run(pools[1], pack_dense(weight), x, memory[:, 20:65], None)
    close = run(pools[1], pack_dense(weight), x.contiguous(), memory.new_empty(rows, 45), None)
    assert torch.equal(memory[:, 20:65], close)
    assert (memory[:, :20] == 7).all()
    assert (memory[:, 65:] == 7).all()


def test_what_lies_behind_an_odd_row_is_not_multiplied(pools):
    x = torch.full((2, 34), float("nan")).bfloat16()
    x[:, :33] = 1
    y = made(pools[0], pack_dense(torch.ones(5, 33).bfloat16()), x[:, :33])
    assert torch.equal(y, torch.full((2, 5), 33.0))


def test_nan_and_infinity_come_through(pools):
    x = torch.ones(3, 40).bfloat16()
    x[0, 7], x[1, 9] = float("nan"), float("inf")
    y = made(pools[0], pack_dense(torch.ones(8, 40).bfloat16()), x)
    assert y[0].isnan().all()
    assert (y[1] == float("inf")).all()
    assert (y[2] == 40).all()


def test_float8_weights_are_taken_exactly_and_scaled_in_float32(pools):
    weight = random(1, 50, 96).to(torch.float8_e4m3fn)
    scale, bias, x = random(2, 50).abs(), random(3, 50), random(4, 6, 96).bfloat16()
    y = made(pools[1], pack_dense(weight, scale, dtype=torch.bfloat16), x, bias)
    sums = made(pools[1], pack_dense(weight.bfloat16()), x)
    assert torch.equal(y, sums * scale + bias)
    assert torch.equal(weight.bfloat16().float(), weight.float())


def test_a_transposed_weight_packs_as_its_copy():
    weight = random(1, 64, 40).T
    assert torch.equal(pack_dense(weight).panels, pack_dense(weight.contiguous()).panels)
    rows = random(1, 40, 100)[:, 10:74]
    assert torch.equal(pack_dense(rows).panels, pack_dense(rows.contiguous()).panels)


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 64, 65, 200])
@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_pack_what_one_packs(outputs, threads, dtype):
    weight = random(1, outputs, 70).to(dtype)
    assert torch.equal(pack_dense(weight, threads=threads).panels, pack_dense(weight).panels)


def test_panels_begin_on_a_cache_line():
    packed = [pack_dense(random(1, 33, 3)) for _ in range(5)]
    assert [weight.panels.data_ptr() % 64 for weight in packed] == [0] * 5


@pytest.mark.parametrize(
    ("x", "y", "bias", "says"),
    [
        (torch.ones(2, 63), torch.ones(2, 32), None, r"\[2, 63\]"),
        (torch.ones(2, 64), torch.ones(3, 32), None, r"\[3, 32\]"),
        (torch.ones(64, 2).T, torch.ones(2, 32), None, "side by side"),
        (torch.ones(2, 64).bfloat16(), torch.ones(2, 32), None, "packed for torch.float32"),
        (torch.ones(2, 64), torch.ones(2, 32).bfloat16(), None, "y must be"),
        (torch.ones(2, 64), torch.ones(2, 32), torch.ones(31), "bias must be"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_runs(x, y, bias, says):
    with pytest.raises(ValueError, match=says):
        linear_op(pack_dense(torch.ones(32, 64)), x, y, bias)


def test_another_dtype_of_weights_is_refused():
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        pack_dense(torch.ones(2, 2, dtype=torch.float16))


@pytest.mark.parametrize(("field", "value"), [("n", 0), ("p", None)])
def test_the_kernel_refuses_an_operation_without_outputs_or_weights(pools, field, value):
    x, y = torch.ones(1, 4), torch.ones(1, 4)
    op = linear_op(pack_dense(torch.ones(4, 4)), x, y)
    getattr(op, field)[1] = value
    with pytest.raises(KernelFailed, match=r"LINEAR.*cannot take"):
        pools[1].run((Op * 1)(op))


def test_no_rows_is_no_work(pools):
    y = made(pools[1], pack_dense(torch.ones(4, 4)), torch.ones(0, 4))
    assert y.shape == (0, 4)
