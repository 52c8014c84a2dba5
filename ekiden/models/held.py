"""How many bytes of weights a rank will hold, known before a byte of them is read.

The model is loaded onto torch's ``meta`` device: every layer asks for its slice as it will later,
gets the shape without the numbers, and makes of it what it will make. What is then counted is what
the rank holds, whatever the family, the split, the dtype or the quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ekiden.core.config import EngineConfig
from ekiden.layers.backends.torch_ops import TorchOps
from ekiden.layers.ops import Linear
from ekiden.layers.weights import LinearWeight
from ekiden.models.config import ModelConfig
from ekiden.models.registry import load_model
from ekiden.parallel.mesh import Mesh

PACKING = frozenset({"native"})
"""Kernels that keep matrices in an order of their own, and so a tied model's head twice."""


class _Packing(TorchOps):
    """Keeps a copy of every matrix, as kernels do that pack them."""

    def linear(
        self, weight: LinearWeight, bias: Tensor | None, *, float_out: bool = False
    ) -> Linear:
        return _Copied(super().linear(weight, bias, float_out=float_out))


class _Copied:
    """A linear that shares none of its tensors with another layer."""

    def __init__(self, linear: Linear) -> None:
        self.tensors = [tensor.clone() for tensor in tensors_of(linear)]

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a model on the meta device is weighed, never run")


def held_bytes(model: ModelConfig, config: EngineConfig, mesh: Mesh, *, packs: bool) -> int:
    """Bytes of weights (and of what else layers keep) of ``mesh``'s rank once it has loaded.

    ``packs``: whether its kernels are among ``PACKING``.

    Raises:
        SetupError: as ``load_model``, before anything is read or allocated.
    """
    ops = _Packing() if packs else TorchOps()
    with torch.inference_mode():
        loaded = load_model(model, config, mesh, torch.device("meta"), ops=ops)
        return sum(tensor.nbytes for tensor in tensors_of(loaded))


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
