"""KV of another dtype arrives as decode's own kernels would have written it, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kv_rig import DTYPES, layout

from ekiden.cache.layout import KvLayout
from ekiden.cache.tensors import read_kv, write_kv
from ekiden.core.errors import InvariantBroken, SetupError
from ekiden.layers.backends.native.copies import MOST_NUMBERS
from kv_transfer import convert, reshard
from kv_transfer.boxes import native_available
from kv_transfer.places import Places
from kv_transfer.staging import Slice, gather, move, scatter

TOKENS, START, BLOCKS = 41, 5, 8
SOURCE, TARGET = [5, 2, 7], [3, 0]
KINDS = ("int8", "fp8_e4m3")
PAIRS = [(a, b) for a in DTYPES for b in DTYPES]
LARGEST = dict.fromkeys(DTYPES, 3e38) | {"float16": 60000.0}
WAYS = {"native": (True, 0), "torch at once": (False, 1 << 20), "torch by unit": (False, 1)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sides(source: str, target: str) -> tuple[KvLayout, KvLayout]:
    """TP2 in blocks of 16 to TP1 x PP2 in blocks of 32; 4 layers, 2 KV heads."""
    return (
        layout(tp=2, dtype=source, head_dim=12),
        layout(pp=2, dtype=target, head_dim=12, block_size=32),
    )


def hard_numbers() -> torch.Tensor:
    """[layers, 2, tokens, heads, D]: rows of many sizes, of zeros, ties, tiny and huge numbers.

    No row that quantises to a scale below the normal numbers, and none of infinities: those are
    noise, and kernels differ on them.
    """
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 2, TOKENS, 2, 12, generator=generator)
    x *= 10.0 ** torch.randint(-6, 6, (4, 2, TOKENS, 2, 1), generator=generator)
    x[:, :, 3] = 0
    x[:, :, 7] = 1 + 2.0**-8 * torch.arange(12)  # halfway between two bfloat16
    x[:, :, 8] = 127.0
    x[:, :, 8, :, 1:] = torch.arange(11) + 0.5  # halfway between two int8
    x[:, :, 11] *= 1e-30
    x[:, :, 13, :, 2] = 1e38
    return x


def caches(kv: KvLayout) -> list[torch.Tensor]:
    """Of bytes that nobody writes: a stray write shows."""
    shapes = [(BLOCKS, *kv.block_shape(rank)) for rank in range(len(kv.ranks))]
    size = kv.row_bytes // kv.row_width
    return [
        torch.full((*shape[:-1], shape[-1] * size), 0x5A, dtype=torch.uint8).view(DTYPES[kv.dtype])
        for shape in shapes
    ]


def slots(kv: KvLayout, blocks: list[int], first: int = 0) -> torch.Tensor:
    positions = torch.arange(first, TOKENS)
    return torch.tensor(blocks)[positions // kv.block_size] * kv.block_size + (
        positions % kv.block_size
    )


def computed(kv: KvLayout) -> list[torch.Tensor]:
    """Prefill's caches, as its kernels write them."""
    numbers, made = hard_numbers().clamp(-LARGEST[kv.dtype], LARGEST[kv.dtype]), caches(kv)
    for r, cache in zip(kv.ranks, made, strict=True):
        for layer in range(r.num_layers):
            k, v = numbers[r.layer_start + layer, :, :, r.head_start : r.head_stop]
            write_kv(cache, layer, k, v, slots(kv, SOURCE))
    return made


def written(source: KvLayout, made: list[torch.Tensor], target: KvLayout) -> list[torch.Tensor]:
    """Decode's caches if its own kernels wrote the numbers that prefill's hold; of the same dtype,
    those that prefill computed, for what moves bit for bit is not rounded twice."""
    expected = caches(target)
    for r, cache in zip(target.ranks, expected, strict=True):
        for layer in range(r.num_layers):
            # Two ranks of one stage, one head each.
            parts = [read_kv(c, r.layer_start + layer, SOURCE, TOKENS) for c in made]
            k, v = (torch.cat([part[i] for part in parts], dim=1) for i in (0, 1))
            if source.dtype == target.dtype:
                limit = LARGEST[source.dtype]
                k, v = hard_numbers()[r.layer_start + layer].clamp(-limit, limit)
            write_kv(cache, layer, k[START:], v[START:], slots(target, TARGET, START))
    return expected


def moved(
    source: KvLayout, made: list[torch.Tensor], target: KvLayout, *, staged: bool
) -> list[torch.Tensor]:
    got = caches(target)
    runs = tuple(reshard.runs(START, TOKENS, reshard.unit_tokens(source, target)))
    for pair in reshard.pairs(source, target):
        heads, layers = pair.local(source.ranks[pair.source])
        there = Slice(heads=heads, layers=layers, runs=runs, blocks=SOURCE)
        heads, layers = pair.local(target.ranks[pair.target])
        here = Slice(heads=heads, layers=layers, runs=runs, blocks=TARGET)
        if staged:
            size = pair.token_bytes(source) * (TOKENS - START)
            message = torch.empty(size, dtype=torch.uint8)
            gather(made[pair.source], there, message)
            scatter(message, here, got[pair.target], source.dtype)
        else:
            move(made[pair.source], there, got[pair.target], here)
    return got


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("staged", [True, False], ids=["scatter", "move"])
@pytest.mark.parametrize("way", WAYS)
def test_every_pair_of_dtypes_arrives_as_decode_would_have_written_it(
    source: str, target: str, staged: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, chunk = WAYS[way]
    monkeypatch.setattr(convert, "CHUNK_BYTES", chunk)
    if not native:
        monkeypatch.setattr(convert, "use_native", lambda _, __: False)
    prefill, decode = sides(source, target)
    made = computed(prefill)
    got = moved(prefill, made, decode, staged=staged)
    assert equal(got, written(prefill, made, decode))
    assert not equal(got, caches(decode))


def rows_of(dtype: str, width: int, count: int) -> torch.Tensor:
    """[1, 1, 1, 2, count, row]: any bits that are a number; quantised ones, of numbers of any size
    between the smallest and the largest scale."""
    generator = torch.Generator().manual_seed(width)
    shape = (1, 1, 1, 2, count, width)
    if dtype in KINDS:
        sizes = 10.0 ** torch.randint(-30, 30, (*shape[:-1], 1), generator=generator)
        return convert.convert_rows(torch.randn(shape, generator=generator) * sizes, DTYPES[dtype])
    bits = torch.randint(0, 256, (*shape[:-1], width * 4), dtype=torch.uint8, generator=generator)
    numbers = bits.view(DTYPES[dtype])[..., :width].contiguous()
    return numbers.nan_to_num(1.0, posinf=float("inf"), neginf=float("-inf"))


@pytest.mark.skipif(not native_available(), reason="no native library on this machine")
@pytest.mark.parametrize(("source", "target"), [(a, b) for a, b in PAIRS if a != b])
@pytest.mark.parametrize("width", [4, 20, 128, 2048])
def test_native_conversions_equal_those_of_torch(source: str, target: str, width: int) -> None:
    rows = rows_of(source, width, 65536 // width // 8)
    if target in KINDS and source not in KINDS:
        # Rows that quantise to a scale that is a normal number.
        limit = min(LARGEST[source], 1e35)
        rows = rows.nan_to_num(1.0, 2.0, -2.0).clamp(-limit, limit)
        rows[..., 0] = 1.0
    expected = convert.convert_rows(rows, DTYPES[target])
    got = torch.zeros_like(expected)
    convert.convert_native(Places(rows, [(0, 0)]), Places(got, [(0, 0)]), rows.shape[4])
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_rows_too_wide_for_the_native_library_are_converted_by_torch() -> None:
    rows = torch.randn(1, 1, 1, 2, 1, MOST_NUMBERS + 4)
    got = torch.zeros_like(rows, dtype=torch.bfloat16)
    convert.copy_converted(Places(rows, [(0, 0)]), Places(got, [(0, 0)]), 1)
    assert torch.equal(got, rows.bfloat16())


@pytest.mark.skipif(not native_available(), reason="no native library on this machine")
@pytest.mark.parametrize("width", [0, MOST_NUMBERS + 4])
def test_the_native_library_refuses_what_has_no_room_in_it(width: int) -> None:
    rows = torch.ones(1, 1, 1, 2, 1, width)
    got = torch.zeros_like(rows, dtype=torch.bfloat16)
    with pytest.raises(InvariantBroken, match=f"rows of {width} numbers cannot be converted"):
        convert.convert_native(Places(rows, [(0, 0)]), Places(got, [(0, 0)]), 1)
    assert not got.any()


def test_rows_of_other_widths_and_units_outside_are_refused() -> None:
    rows, narrow = torch.zeros(1, 1, 1, 2, 4, 8), torch.zeros(1, 1, 1, 2, 4, 8, dtype=torch.int8)
    with pytest.raises(InvariantBroken, match="cannot become rows"):
        convert.copy_converted(Places(rows, [(0, 0)]), Places(narrow, [(0, 0)]), 1)
    half = rows.half()
    with pytest.raises(InvariantBroken, match="lie outside"):
        convert.copy_converted(Places(rows, [(0, 0)]), Places(half, [(0, 2)]), 3)


def test_floats_are_rounded_to_the_nearest_halves_to_even() -> None:
    ulp = 2.0**-7  # of a bfloat16 from 1 to 2
    x = 1 + ulp * torch.tensor([0.5, 0.50001, 1.5, 2.5, 3.4999])
    expected = 1 + ulp * torch.tensor([0.0, 1.0, 2.0, 2.0, 3.0])
    assert torch.equal(convert.convert_rows(x, torch.bfloat16).float(), expected)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_a_quantised_row_is_read_with_its_scale(dtype: str) -> None:
    row = torch.tensor([[448.0, -224.0, 0.0, 112.0]]) * 0.25
    kept = convert.convert_rows(row, DTYPES[dtype])
    assert kept.shape == (1, 8)
    read = convert.convert_rows(kept, torch.float32)
    assert torch.allclose(read, row, atol=float(row.abs().max()) / 127 / 2 * 1.001)
    assert read[0, 0] == 112.0


def test_a_message_of_another_size_is_refused_before_anything_is_written() -> None:
    prefill, decode = sides("float32", "bfloat16")
    cache = caches(decode)[0]
    runs = tuple(reshard.runs(0, 20, 16))
    part = Slice(heads=slice(0, 1), layers=slice(0, 2), runs=runs, blocks=TARGET)
    rows = 20 * 2 * 2
    for size in (rows * prefill.row_bytes - 4, rows * prefill.row_bytes + 4, rows * 24):
        with pytest.raises(InvariantBroken, match="a message of"):
            scatter(torch.zeros(size, dtype=torch.uint8), part, cache, "float32")
    assert equal([cache], [caches(decode)[0]])


def test_runs_that_differ_cannot_be_moved() -> None:
    prefill, decode = sides("float32", "float32")
    part = Slice(heads=slice(0, 1), layers=slice(0, 2), runs=(reshard.Run(0, 4, 1),), blocks=[1])
    other = Slice(heads=slice(0, 1), layers=slice(0, 2), runs=(reshard.Run(0, 4, 2),), blocks=[1])
    with pytest.raises(InvariantBroken, match="cannot move to"):
        move(caches(prefill)[0], part, caches(decode)[0], other)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SetupError, match=r"KV dtype int3 .* float32, bfloat16, float16, int8, fp8"):
        convert.kv_dtype("int3")
