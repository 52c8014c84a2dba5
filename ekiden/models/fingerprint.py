"""Two names for "the same model": one of its weights, one of its tokenizer. No torch.

Replicas compare them when they first meet, so KV never passes between different models.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import msgspec

from ekiden.core.config import ON_LOAD
from ekiden.core.errors import SetupError
from ekiden.models.checkpoint import Checkpoint, TensorInfo

SAMPLE_BYTES = 512
_NEUTRAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Fields of config.json that change no number; the dtype is compared with the KV layout."""


def model_fingerprint(path: Path, quantization: str = "auto") -> str:
    """Hex digest over the config and, of every tensor, its name, dtype, shape and a sample.

    ``quantization`` (``--quantization``) is said behind it where it changes the weights.

    The sample is ``SAMPLE_BYTES`` from the start, the middle and the end of each tensor, so a
    fine-tune of the same shape gets another name while gigabytes stay unread. How tensors are
    dealt to files does not matter.

    Raises:
        SetupError: as ``Checkpoint.open``, or config.json cannot be read.
    """
    digest = hashlib.sha256(b"ekiden-model-v1")
    config = _config(path / "config.json")
    _field(digest, msgspec.json.encode(config, order="deterministic"))
    tensors = Checkpoint.open(path).tensors
    streams: dict[Path, BinaryIO] = {}
    try:
        for name in sorted(tensors):
            info = tensors[name]
            if info.file not in streams:
                streams[info.file] = info.file.open("rb")
            _field(digest, f"{name} {info.dtype} {list(info.shape)}".encode())
            _field(digest, _sample(streams[info.file], info))
    finally:
        for stream in streams.values():
            stream.close()
    on_load = quantization in ON_LOAD and not config.get("quantization_config")
    return digest.hexdigest() + (f"+{quantization}" if on_load else "")


def tokenizer_fingerprint(path: Path) -> str:
    """Hex digest of ``tokenizer.json`` (or ``tokenizer.model``); ``none`` where neither exists."""
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).exists():
            return hashlib.sha256((path / name).read_bytes()).hexdigest()
    return "none"


def _config(file: Path) -> dict[str, object]:
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from None
    return {name: value for name, value in config.items() if name not in _NEUTRAL}


def _sample(stream: BinaryIO, info: TensorInfo) -> bytes:
    last = max(info.start, info.stop - SAMPLE_BYTES)
    pieces = b""
    for offset in sorted({info.start, (info.start + last) // 2, last}):
        stream.seek(offset)
        pieces += stream.read(min(SAMPLE_BYTES, info.stop - offset))
    return pieces


def _field(digest: hashlib._Hash, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little") + data)
