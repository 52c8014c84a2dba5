"""What a directory of safetensors files holds, read from their headers alone. No torch.

Everything that can be wrong with the files is found here, before a byte of weights is read: an
index that is at odds with its shards, a shard that is missing, cut short or not safetensors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
_MAX_HEADER = 100 << 20


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a checkpoint: bytes [start, stop) of ``file``, row-major."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Every tensor of a model directory by name."""

    path: Path
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the headers of ``model.safetensors`` or of the shards that the index names.

        Files that the index does not name are left alone: the index says of each tensor which
        file holds it, so a stale shard beside it is never read.

        Raises:
            SetupError: names the file, and the tensor where there is one.
        """
        index = path / INDEX
        if not index.exists():
            return cls(path=path, tensors=_read_header(_lone_file(path)))
        weight_map = _read_index(index)
        if (path / SINGLE).exists() and SINGLE not in weight_map.values():
            raise SetupError(
                f"{path} holds both {SINGLE} and {INDEX}, and only one of them can be right: "
                "remove the stale one"
            )
        return cls(path=path, tensors=_indexed(path, weight_map))


def _lone_file(path: Path) -> Path:
    if (path / SINGLE).exists():
        return path / SINGLE
    if shards := sorted(file.name for file in path.glob("*.safetensors")):
        raise SetupError(f"{path / INDEX} does not exist, and {shards[0]} needs it")
    pickles = [*path.glob("*.bin"), *path.glob("*.pt*")]
    hint = " (pickled weights are not read: convert them to safetensors)" if pickles else ""
    raise SetupError(f"{path} holds no weights: {SINGLE} does not exist{hint}")


def _read_index(index: Path) -> dict[str, str]:
    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise SetupError(f"{index} cannot be read: {error}") from None
    for name in weight_map.values():
        if Path(name).name != name:
            raise SetupError(f"{index} names {name!r}, which is not a file of its own directory")
    return weight_map


def _indexed(path: Path, weight_map: dict[str, str]) -> dict[str, TensorInfo]:
    files = sorted(set(weight_map.values()))
    if missing := [name for name in files if not (path / name).exists()]:
        raise SetupError(
            f"{path / INDEX} names {len(files)} files and {len(missing)} do not exist: "
            f"{', '.join(missing)}"
        )
    headers = {name: _read_header(path / name) for name in files}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise SetupError(f"{path / name} does not hold {tensor}, which {INDEX} says it does")
    return {tensor: headers[name][tensor] for tensor, name in weight_map.items()}


def _read_header(file: Path) -> dict[str, TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise SetupError(f"{file} is cut short or is not safetensors: {size} bytes")
        raw = stream.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, dict[str, Any]])
        header.pop("__metadata__", None)
        tensors = {name: _tensor(file, 8 + length, entry) for name, entry in header.items()}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise SetupError(f"{file} has a broken safetensors header: {error}") from None
    expected = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if size != expected:
        raise SetupError(
            f"{file} is {size} bytes and its header says {expected}: it was cut short or "
            "overwritten; fetch it again"
        )
    return tensors


def _tensor(file: Path, base: int, entry: dict[str, Any]) -> TensorInfo:
    start, stop = entry["data_offsets"]
    info = TensorInfo(
        file=file,
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        start=base + start,
        stop=base + stop,
    )
    width = ELEMENT_BYTES.get(info.dtype)
    if width is not None and stop - start != width * math.prod(info.shape):
        raise ValueError(f"offsets {start}:{stop} do not fit {info.dtype} {list(info.shape)}")
    return info
