"""The native copies do what torch does, byte for byte, and touch nothing else."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.core.errors import InvariantBroken
from ekiden.layers.backends.native.build import COMPILER, NativeUnavailable, check_cpu
from kv_transfer import boxes
from kv_transfer.boxes import copy_by_torch, copy_native, copy_units
from kv_transfer.places import Places

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


@pytest.fixture
def forget_library() -> Iterator[None]:
    boxes.native_available.cache_clear()
    yield
    boxes.native_available.cache_clear()


def has_native() -> bool:
    """Should this machine have the library? One that fails to build is a failure, not a skip."""
    try:
        check_cpu()
    except NativeUnavailable:
        return False
    return shutil.which(COMPILER) is not None


def memory(shape: tuple[int, ...], dtype: torch.dtype, seed: int, shift: int) -> torch.Tensor:
    """Random bytes, ``shift`` elements off the start of its storage."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    whole = torch.randint(
        0, 256, ((count + shift) * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    return whole.view(dtype)[shift:].view(shape)


def part(draw: st.DrawFn, most: int, count: int) -> slice:
    start = draw(st.integers(0, most - count))
    return slice(start, start + count)


@st.composite
def copies(draw: st.DrawFn) -> tuple[Places, Places, int]:
    """(source, target, tokens): parts of two caches, units at random spots."""
    dtype, row = (
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([1, 3, 16, 132, 600]) | st.integers(64, 900)),
    )
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    count, tokens = draw(st.integers(0, 4)), draw(st.sampled_from([1, 2, 5, 16]))
    sides = []
    for seed in (1, 2):
        all_heads, all_layers = (draw(st.integers(n, n + 2)) for n in (heads, layers))
        size = tokens + draw(st.sampled_from([0, 0, 1, 16]))
        whole = memory(
            (6, all_heads, all_layers, 2, size, row), dtype, seed, draw(st.integers(0, 3))
        )
        share = whole[:, part(draw, all_heads, heads), part(draw, all_layers, layers)]
        blocks = draw(st.permutations(range(6)))[:count]
        sides.append(Places(share, [(b, draw(st.integers(0, size - tokens))) for b in blocks]))
    return sides[0], sides[1], tokens


def storage(places: Places) -> torch.Tensor:
    """Everything that a stray copy might have written, as bytes."""
    stored = places.memory_UHL2SR.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(stored).clone()


@pytest.mark.skipif(not has_native(), reason="no native library on this machine")
@settings(max_examples=100, deadline=None)
@given(copies(), st.booleans())
def test_native_copies_equal_those_of_torch(
    case: tuple[Places, Places, int], streamed: bool
) -> None:
    source, target, tokens = case
    before = storage(target)
    copy_by_torch(source, target, tokens)
    expected = storage(target)
    target.memory_UHL2SR.untyped_storage().copy_(before.untyped_storage())
    copy_native(source, target, tokens, streamed=streamed)
    assert torch.equal(storage(target), expected)


def places(blocks: int = 2, size: int = 4, row: int = 2, spot: tuple[int, int] = (0, 0)) -> Places:
    return Places(torch.zeros(blocks, 1, 1, 2, size, row), [spot])


@pytest.mark.parametrize("spot", [(-1, 0), (2, 0), (0, -1), (0, 2)])
@pytest.mark.parametrize("broken", ["source", "target"])
def test_a_unit_outside_its_memory_is_refused(spot: tuple[int, int], broken: str) -> None:
    good, bad = places(), places(spot=spot)
    source, target = (bad, good) if broken == "source" else (good, bad)
    with pytest.raises(InvariantBroken, match=rf"block {spot[0]} lie outside a cache of 2 blocks"):
        copy_units(source, target, 3)


def test_memories_of_other_shapes_or_rows_apart_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="cannot be copied"):
        copy_units(places(row=2), places(row=3), 1)
    with pytest.raises(InvariantBroken, match=r"2 units .* cannot be copied to 1"):
        copy_units(places()._replace(spots=[(0, 0), (1, 0)]), places(), 1)
    apart = Places(torch.zeros(2, 1, 1, 2, 4, 4)[..., :2], [(0, 0)])
    with pytest.raises(InvariantBroken, match="one behind the other"):
        copy_units(apart, places(), 1)


@pytest.mark.usefixtures("forget_library")
def test_without_the_library_torch_copies_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise NativeUnavailable("this CPU lacks avx512f")

    monkeypatch.setattr(boxes, "load", missing)
    source, target = places(spot=(1, 1)), places(spot=(0, 2))
    source.memory_UHL2SR.fill_(7)
    with caplog.at_level(logging.WARNING, boxes.__name__):
        copy_units(source, target, 2)
        copy_units(source, target, 2)
    assert target.memory_UHL2SR[0, :, :, :, 2:].eq(7).all()
    assert [r.getMessage() for r in caplog.records] == [
        "KV is copied and converted by torch, which is slower: this CPU lacks avx512f"
    ]
