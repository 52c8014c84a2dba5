"""``quantization_config`` of ``config.json``: how a checkpoint's matrices are stored. No torch.

Four methods, as their tools write them: ``gptq`` (AutoGPTQ, GPTQModel; arXiv:2210.17323), ``awq``
(AutoAWQ; arXiv:2306.00978), ``compressed-tensors`` (llm-compressor) and ``fp8`` (whole tensors, or
blocks as in DeepSeek-V3). Only weights are read in small: what a file says of quantised
activations is left aside, and activations stay in the model's dtype, which is more exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ekiden.core.errors import SetupError

METHODS = ("gptq", "awq", "compressed-tensors", "fp8")


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How quantised matrices lie in a checkpoint. Those that it has as floats stay floats."""

    method: str
    packing: str
    """``gptq``, ``awq``, ``words`` (compressed-tensors, in 32-bit words), ``bytes`` or ``fp8``."""
    bits: int = 8
    group_size: int = 0
    """Inputs with one scale; 0: all of them."""
    symmetric: bool = True
    """``words``: there are no zero points."""
    zero_offset: int = 0
    """``gptq``: what stored zero points lack (1 in the first version of the format)."""
    sorted_inputs: bool = False
    """Groups are of inputs that do not lie together (``desc_act``, ``actorder``)."""
    block: tuple[int, int] | None = None
    """``fp8``: outputs and inputs of one scale; None: one for the tensor or for each output."""
    scale_name: str = "weight_scale"


class _Reader:
    """The JSON object, and sentences that name the file and the field."""

    def __init__(self, values: dict[str, Any], file: Path, place: str) -> None:
        self.values = values
        self.file = file
        self.place = place

    def choice(self, names: str | tuple[str, ...], valid: tuple[Any, ...], default: Any) -> Any:
        """The first of ``names`` that is there, if it is one of ``valid``."""
        names = (names,) if isinstance(names, str) else names
        found = [name for name in names if self.values.get(name) is not None]
        value = self.values[found[0]] if found else default
        if type(value) not in {type(v) for v in valid} or value not in valid:
            raise self.refused(found[0] if found else names[0], value, valid)
        return value

    def group_size(self, names: str | tuple[str, ...], default: int) -> int:
        names = (names,) if isinstance(names, str) else names
        value = next((self.values[n] for n in names if self.values.get(n) is not None), default)
        if type(value) is not int or not (value == -1 or _is_group(value)):
            valid = ("-1", "a multiple of 8 up to 128", "a multiple of 128")
            raise self.refused(names[0], value, valid)
        return max(value, 0)

    def absent(self, *names: str) -> None:
        """Fields that would change the numbers, and that nothing here reads."""
        for name in names:
            if self.values.get(name):
                raise self.refused(name, self.values[name], ("nothing",))

    def inner(self, name: str) -> _Reader:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.refused(name, value, ("an object",))
        return _Reader(value, self.file, f"{self.place}.{name}")

    def refused(self, name: str, value: Any, valid: tuple[Any, ...]) -> SetupError:
        choices = ", ".join(str(choice) for choice in valid)
        return SetupError(
            f"{self.file}: {self.place}.{name} {value!r} is not supported: it may be {choices}"
        )


def _is_group(size: int) -> bool:
    """Whether kernels know groups of this size."""
    return size > 0 and size % (8 if size <= 128 else 128) == 0


def parse_quantization(values: dict[str, Any] | None, file: Path) -> QuantizationConfig | None:
    """``values`` is the field's object; None or an empty one: the checkpoint is of floats.

    Raises:
        SetupError: a method or a variant that is not read; names file, field, value and choices.
    """
    if not values:
        return None
    reader = _Reader(values, file, "quantization_config")
    method = reader.choice("quant_method", METHODS, None)
    parse = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
    }
    return parse[method](reader)


def _gptq(reader: _Reader) -> QuantizationConfig:
    reader.absent("dynamic")
    reader.choice("pack_dtype", ("int32",), "int32")
    version = reader.choice(("checkpoint_format", "format"), ("gptq", "gptq_v2"), "gptq")
    return QuantizationConfig(
        method="gptq",
        packing="gptq",
        bits=reader.choice("bits", (4, 8), None),
        group_size=reader.group_size("group_size", -1),
        zero_offset=1 if version == "gptq" else 0,
        sorted_inputs=reader.choice("desc_act", (True, False), False),
    )


def _awq(reader: _Reader) -> QuantizationConfig:
    reader.choice("version", ("gemm", "GEMM"), "gemm")
    reader.choice("zero_point", (True,), True)
    return QuantizationConfig(
        method="awq",
        packing="awq",
        bits=reader.choice(("bits", "w_bit"), (4,), None),
        group_size=reader.group_size(("group_size", "q_group_size"), 128),
    )


def _fp8(reader: _Reader) -> QuantizationConfig:
    reader.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    reader.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    block = reader.values.get("weight_block_size")
    return QuantizationConfig(
        method="fp8",
        packing="fp8",
        block=_block(reader, "weight_block_size") if block else None,
        scale_name="weight_scale_inv" if block else "weight_scale",
    )


def _block(reader: _Reader, name: str) -> tuple[int, int]:
    value = reader.values.get(name)
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise reader.refused(name, value, ("two whole numbers above 0",))
    return sizes[0], sizes[1]


def _compressed_tensors(reader: _Reader) -> QuantizationConfig:
    reader.absent("kv_cache_scheme", "transform_config")
    if sparsity := reader.values.get("sparsity_config"):
        _Reader(sparsity, reader.file, f"{reader.place}.sparsity_config").choice(
            "format", ("dense",), "dense"
        )
    reader.choice("quantization_status", ("compressed",), "compressed")
    groups = reader.inner("config_groups")
    if len(groups.values) != 1:
        raise reader.refused("config_groups", list(groups.values), ("one group",))
    group = groups.inner(next(iter(groups.values)))
    packing = reader.choice(
        "format", ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"), None
    )
    return _ct_weights(group.inner("weights"), packing)


def _ct_weights(weights: _Reader, packing: str) -> QuantizationConfig:
    if packing == "naive-quantized":
        packing = {"int": "int-quantized", "float": "float-quantized"}[
            weights.choice("type", ("int", "float"), "int")
        ]
    is_float = packing == "float-quantized"
    weights.choice("type", ("float",) if is_float else ("int",), "int")
    strategies = {
        "float-quantized": ("tensor", "channel", "block"),
        "int-quantized": ("tensor", "channel"),
        "pack-quantized": ("group", "channel"),
    }[packing]
    strategy = weights.choice("strategy", strategies, None)
    symmetric = weights.choice("symmetric", (True, False), True)
    if packing != "pack-quantized" and not symmetric:
        raise weights.refused("symmetric", symmetric, (True,))
    order = weights.choice("actorder", ("group", "weight", "static", False), False)
    return QuantizationConfig(
        method="compressed-tensors",
        packing={"float-quantized": "fp8", "int-quantized": "bytes", "pack-quantized": "words"}[
            packing
        ],
        bits=weights.choice("num_bits", (4, 8) if packing == "pack-quantized" else (8,), None),
        group_size=weights.group_size("group_size", -1) if strategy == "group" else 0,
        symmetric=symmetric,
        sorted_inputs=order == "group",
        block=_block(weights, "block_structure") if strategy == "block" else None,
    )
