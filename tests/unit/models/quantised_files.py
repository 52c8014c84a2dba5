"""Quantised checkpoints made by hand, and the float model that they stand for.

The packing is written from the formats' descriptions, element by element where that is clearest,
and shares no code with what reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.models.tiny import make_checkpoint

GROUP = 32
Tensors = dict[str, Tensor]
Array = np.ndarray[Any, Any]


class Matrix(NamedTuple):
    """A quantised matrix: numbers [out, in], scale and zero of each output and group."""

    numbers: Array
    scales: Array
    zeros: Array
    groups: Array
    """The group of each input."""

    def floats(self) -> Tensor:
        out = np.empty(self.numbers.shape, dtype=np.float32)
        for i, group in enumerate(self.groups):
            out[:, i] = (self.numbers[:, i] - self.zeros[:, group]) * self.scales[:, group]
        return torch.from_numpy(out)


class Format(NamedTuple):
    """A kind of checkpoint: its ``quantization_config``, and one matrix in it."""

    config: dict[str, Any]
    store: Callable[[Tensor], tuple[Tensors, Tensor]]
    """A float matrix to (tensors by suffix, the matrix that these stand for)."""

    @property
    def grouped(self) -> bool:
        return f'"group_size": {GROUP}' in json.dumps(self.config)


def make_quantised(path: Path, kind: Format, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint of ``kind``; return transformers' model with the same numbers."""
    model = make_checkpoint(path, "llama3", **{"intermediate_size": 128, **changes})
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for name, linear in model.named_modules():
            if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
                continue
            stored, floats = kind.store(linear.weight)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{suffix}": value.contiguous() for suffix, value in stored.items()}
            linear.weight.copy_(floats)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = kind.config
    (path / "config.json").write_text(json.dumps(config))
    return model


def quantise_simply(
    weight: Tensor, bits: int, group: int, symmetric: bool, shuffled: bool = False
) -> Matrix:
    """From the least to the largest of each group; scales as float16 has them."""
    matrix = weight.detach().numpy().astype(np.float64)
    outs, ins = matrix.shape
    groups = np.arange(ins) // (group or ins)
    if shuffled:
        groups = np.random.default_rng(ins).permutation(groups)
    count, top = groups.max() + 1, 2**bits - 1
    scales, zeros = np.zeros((outs, count)), np.zeros((outs, count), dtype=np.int64)
    for g in range(count):
        part = matrix[:, groups == g]
        low, high = part.min(1), part.max(1)
        if symmetric:
            high = np.abs(part).max(1)
            low = -high
        scales[:, g] = ((high - low) / top).astype(np.float16)
        zeros[:, g] = (
            (top + 1) // 2 if symmetric else np.clip(np.round(-low / scales[:, g]), 0, top)
        )
    numbers = np.clip(np.round(matrix / scales[:, groups]) + zeros[:, groups], 0, top)
    return Matrix(numbers.astype(np.int64), scales.astype(np.float32), zeros, groups)


def words(numbers: Array, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last axis: number ``places[j]`` of a word takes bits [j * bits, ...)."""
    per = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per)))
    packed = np.zeros((len(padded), padded.shape[1] // per), dtype=np.uint32)
    for j in range(per):
        packed |= padded[:, (places[j] if places else j) :: per].astype(np.uint32) << (bits * j)
    return torch.from_numpy(packed.view(np.int32).copy())


def gptq(
    bits: int, *, group: int = GROUP, symmetric: bool = True, order: bool = False, v2: bool = False
) -> Format:
    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        m = quantise_simply(weight, bits, group, symmetric, order)
        stored_zeros = m.zeros if v2 else (m.zeros - 1) % 2**bits
        return {
            "qweight": words(m.numbers, bits).T.contiguous(),
            "qzeros": words(stored_zeros.T, bits),
            "scales": torch.from_numpy(m.scales.T.astype(np.float16)),
            "g_idx": torch.from_numpy(m.groups.astype(np.int32)),
            "bias": torch.zeros(len(weight)),
        }, m.floats()

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": order,
        "sym": symmetric,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return Format(config, store)


def awq() -> Format:
    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        m = quantise_simply(weight, 4, GROUP, symmetric=False)
        places = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": words(m.numbers.T, 4, places),
            "qzeros": words(m.zeros.T, 4, places),
            "scales": torch.from_numpy(m.scales.T.astype(np.float16)),
        }, m.floats()

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    return Format(config | {"version": "gemm"}, store)


def compressed(packing: str, **weights: Any) -> dict[str, Any]:
    """The configuration that llm-compressor writes."""
    group = {"targets": ["Linear"], "input_activations": None, "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def packed(bits: int, *, group: int = GROUP, symmetric: bool = True, order: bool = False) -> Format:
    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        m = quantise_simply(weight, bits, group, symmetric, order)
        stored = {
            "weight_packed": words(m.numbers, bits),
            "weight_scale": torch.from_numpy(m.scales).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words(m.zeros.T, bits).T.contiguous()
        if order:
            stored["weight_g_idx"] = torch.from_numpy(m.groups.astype(np.int32))
        scales = stored["weight_scale"].float().numpy()
        return stored, m._replace(scales=scales).floats()

    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "symmetric": symmetric,
        "actorder": "group" if order else None,
    }
    return Format(compressed("pack-quantized", **weights), store)


def int8_bytes() -> Format:
    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        numbers = (weight.detach() / scale).round()
        return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    return Format(compressed("int-quantized", **weights), store)


def _e4m3(weight: Tensor, axis: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    scale = weight.detach().abs().amax(axis, keepdim=True) / 448
    return (weight.detach() / scale).to(torch.float8_e4m3fn), scale


def float8(strategy: str) -> Format:
    """``tensor`` or ``channel`` of compressed-tensors, or ``fp8`` of one scale a tensor."""

    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        values, scale = _e4m3(weight, (1,) if strategy == "channel" else (0, 1))
        stored = {"weight": values, "weight_scale": scale if scale.numel() > 1 else scale.view(1)}
        if strategy == "fp8":
            stored["input_scale"] = torch.tensor(1.0)
        return stored, values.float() * scale

    if strategy == "fp8":
        return Format({"quant_method": "fp8", "activation_scheme": "static"}, store)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    return Format(compressed("float-quantized", **weights), store)


def float8_blocks(rows: int, columns: int) -> Format:
    def store(weight: Tensor) -> tuple[Tensors, Tensor]:
        outs, ins = weight.shape
        scales = torch.zeros(-(-outs // rows), -(-ins // columns))
        values, floats = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros(outs, ins)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                values[at], scale = _e4m3(weight[at], (0, 1))
                scales[i, j] = scale
                floats[at] = values[at].float() * scale
        return {"weight": values, "weight_scale_inv": scales}, floats

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]}
    return Format(config | {"activation_scheme": "dynamic"}, store)


FORMATS: dict[str, Format] = {
    "gptq4": gptq(4),
    "gptq4-zeros": gptq(4, symmetric=False),
    "gptq4-v2": gptq(4, symmetric=False, v2=True),
    "gptq4-channel": gptq(4, group=0),
    "gptq4-sorted": gptq(4, symmetric=False, order=True),
    "gptq8": gptq(8),
    "gptq8-zeros": gptq(8, symmetric=False),
    "awq": awq(),
    "packed4": packed(4),
    "packed4-zeros": packed(4, symmetric=False),
    "packed4-sorted": packed(4, order=True),
    "packed8-channel": packed(8, group=0),
    "int8": int8_bytes(),
    "float8-tensor": float8("tensor"),
    "float8-channel": float8("channel"),
    "fp8": float8("fp8"),
    "fp8-blocks": float8_blocks(24, 40),
}
