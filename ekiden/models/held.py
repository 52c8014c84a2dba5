"""How many bytes of weights a rank will hold, known before a byte of them is read.

The model is loaded onto torch's ``meta`` device: every layer asks for its slice as it will later,
gets the shape without the numbers, and makes of it what it will make. What is then counted is what
the rank holds, whatever the family, the split, the dtype or the quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ekiden.cache.tensors import TORCH_DTYPES
from ekiden.core.config import EngineConfig
from ekiden.layers.backends.choose import wants_native
from ekiden.layers.backends.native.build import NativeUnavailable, library_file
from ekiden.layers.backends.native.library import DTYPES as NATIVE_DTYPES
from ekiden.layers.backends.native.packed import packed_bytes
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.ops import Linear
from ekiden.layers.weights import GroupedWeight, LinearWeight
from ekiden.models.config import ModelConfig
from ekiden.models.registry import load_model
from ekiden.parallel.mesh import Mesh


class _Packing(TorchOps):
    """Holds of every matrix as much as the native kernels do, who pack it anew."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(
        self, weight: LinearWeight, bias: Tensor | None, *, float_out: bool = False
    ) -> Linear:
        return _Packed(packed_bytes(weight, self.dtype), bias)


class _Small(TorchOps):
    """Holds quantised matrices as small as the CUDA kernels do, and floats as they are."""

    def linear(
        self, weight: LinearWeight, bias: Tensor | None, *, float_out: bool = False
    ) -> Linear:
        if isinstance(weight, GroupedWeight):
            numbers = weight.values.nbytes * weight.bits // 8
            return _Packed(numbers + weight.scales.nbytes + weight.zeros.nbytes, bias)
        if weight.scale is not None:
            return _Packed(weight.values.nbytes + weight.scale.nbytes, bias)
        return super().linear(weight, bias, float_out=float_out)


class _Packed:
    """A linear that shares none of its memory with another layer."""

    def __init__(self, size: int, bias: Tensor | None) -> None:
        self.panels = torch.empty(size, dtype=torch.uint8, device="meta")
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a model on the meta device is weighed, never run")


def held_bytes(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> int:
    """Bytes of weights (and of what else layers keep) of ``mesh``'s rank once it has loaded.

    Raises:
        SetupError: as ``load_model``, before anything is read or allocated.
    """
    ops = _weighing_ops(config, TORCH_DTYPES[model.resolve_dtype(config)])
    with torch.inference_mode():
        loaded = load_model(model, config, mesh, torch.device("meta"), ops=ops)
        return sum(tensor.nbytes for tensor in tensors_of(loaded))


def _weighing_ops(config: EngineConfig, dtype: torch.dtype) -> TorchOps:
    if packs(config, dtype):
        return _Packing(dtype)
    return _Small() if config.device == "cuda" and config.kernels != "torch" else TorchOps()


def packs(config: EngineConfig, dtype: torch.dtype) -> bool:
    """Whether the native kernels will be chosen, as ``backends.choose`` does on the ranks."""
    if not wants_native(config.kernels, config.device) or dtype not in NATIVE_DTYPES:
        return False
    try:
        library_file()  # Builds them where they are not yet: once, and not on every rank at once.
    except NativeUnavailable:
        return False
    return True


def tensors_of(holder: object) -> Iterator[Tensor]:
    """Every tensor that an object holds, in its attributes, lists and dicts; each once."""
    seen: set[int] = set()
    waiting: list[object] = [holder]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, list | tuple):
            waiting.extend(thing)
        elif type(thing).__module__.startswith("ekiden."):
            waiting.extend(vars(thing).values() if hasattr(thing, "__dict__") else ())
