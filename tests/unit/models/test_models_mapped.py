"""Slices of mapped files: equal to what safetensors reads, owned, and nothing more is touched."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ekiden.core.errors import SetupError
from ekiden.models import mapped
from ekiden.models.checkpoint import Checkpoint, TensorInfo
from ekiden.models.mapped import read_slice

ROWS, COLUMNS = 37, 19


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mapped")
    whole = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    tensors = {"f32": whole, "bf16": whole.bfloat16(), "f16": whole.half(), "f64": whole.double()}
    tensors |= {"i32": whole.int(), "u8": whole.abs().byte(), "bias": whole[0].clone()}
    tensors |= {"one": torch.tensor(2.5), "none": torch.zeros(0, 4)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_dtype_is_read_as_safetensors_reads_it(path: Path) -> None:
    infos = Checkpoint.open(path).tensors
    for name, expected in load_file(path / "model.safetensors").items():
        got = read_slice(infos[name])
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), name


@given(
    a=st.integers(0, ROWS),
    b=st.integers(0, ROWS),
    c=st.integers(0, COLUMNS),
    d=st.integers(0, COLUMNS),
    window=st.integers(1, 4000),
    name=st.sampled_from(["f32", "bf16"]),
)
def test_any_slice_through_any_window(
    path: Path, a: int, b: int, c: int, d: int, window: int, name: str
) -> None:
    rows, columns = (min(a, b), max(a, b)), (min(c, d), max(c, d))
    info = Checkpoint.open(path).tensors[name]
    whole = load_file(path / "model.safetensors")[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "WINDOW", window)
        got = read_slice(info, rows=rows, columns=columns, dtype=torch.float64)
    assert torch.equal(got, whole[rows[0] : rows[1], columns[0] : columns[1]].double())
    assert got.is_contiguous()


def test_what_was_read_is_owned_and_the_file_is_not_written(path: Path) -> None:
    before = (path / "model.safetensors").read_bytes()
    info = Checkpoint.open(path).tensors["f32"]
    got = read_slice(info)
    got.zero_()
    assert got.untyped_storage().nbytes() == got.nbytes
    assert (path / "model.safetensors").read_bytes() == before
    assert read_slice(info).any()


def test_data_that_a_header_put_off_its_alignment_is_read(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    header = {"w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, values.nbytes]}}
    text = json.dumps(header).encode()
    text += b" " * ((3 - len(text) - 8) % 4)  # The data then begins at 3 modulo 4.
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + values.numpy().tobytes())
    info = Checkpoint.open(tmp_path).tensors["w"]
    assert info.start % 4 == 3
    got = read_slice(info, rows=(1, 3))
    assert torch.equal(got, values[1:])
    assert got.data_ptr() % 4 == 0


def test_only_the_rows_asked_for_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads its own part: of 64 pages, the one that its rows lie in, and no window more."""
    page = mmap.PAGESIZE
    save_file({"w": torch.zeros(64, page // 4)}, tmp_path / "model.safetensors")
    info = Checkpoint.open(tmp_path).tensors["w"]
    seen: list[tuple[int, int]] = []
    real = mapped._map

    def noted(file: object, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        seen.append((start, size))
        return real(file, start, size, dtype)  # type: ignore[arg-type]

    monkeypatch.setattr(mapped, "_map", noted)
    monkeypatch.setattr(mapped, "WINDOW", 8 * page)
    read_slice(info, rows=(20, 30))
    assert seen == [(info.start + 20 * page, 8 * page), (info.start + 28 * page, 2 * page)]
    seen.clear()
    read_slice(info, columns=(0, 5))
    assert [size for _, size in seen] == [8 * page] * 8, "each row once, whichever columns"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="resident pages are Linux's to show")
def test_the_window_and_not_the_file_stands_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as one slice is read, at most two windows of the file are mapped."""
    monkeypatch.setattr(mapped, "WINDOW", 1 << 20)
    save_file({"w": torch.ones(32, 1 << 18)}, tmp_path / "model.safetensors")
    most = 0
    real = mapped._map

    def watched(file: object, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal most
        part = real(file, start, size, dtype)  # type: ignore[arg-type]
        lines = Path("/proc/self/smaps").read_text().splitlines()
        most = max(most, _mapped_bytes(lines, str(tmp_path)))
        return part

    monkeypatch.setattr(mapped, "_map", watched)
    read_slice(Checkpoint.open(tmp_path).tensors["w"])
    assert 0 < most <= 2 * (mapped.WINDOW + mmap.ALLOCATIONGRANULARITY)


def _mapped_bytes(smaps: list[str], path: str) -> int:
    ranges = [line.split()[0] for line in smaps if path in line]
    return sum(int(b, 16) - int(a, 16) for a, b in (text.split("-") for text in ranges))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    info = TensorInfo(file=tmp_path / "gone.safetensors", dtype="F32", shape=(2,), start=0, stop=8)
    with pytest.raises(SetupError, match=r"gone\.safetensors cannot be mapped"):
        read_slice(info)
