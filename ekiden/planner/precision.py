"""Formats of weights and of KV: what a matrix takes in bytes, and which matrices stay wide.

A quantised checkpoint never has all of its matrices small. Embedding, head, routers, norms and
biases stay floats in every format here, attention too in some: that is a quarter of a small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.matrices import Matrix
from ekiden.planner.names import unknown

FLOATS = {"bf16": 2, "fp16": 2, "fp32": 4}
LINEAR = frozenset({"attention", "mlp", "shared", "expert"})
"""Matrices that quantisers take unless told otherwise."""


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the matrices of ``parts`` are stored; all the others are floats of ``wide`` bytes."""

    name: str
    bits: int
    source: str
    parts: frozenset[str] = LINEAR
    wide: int = 2
    group: int = 0
    """Inputs that share one scale; 0: all of them."""
    group_rows: int = 1
    """Outputs that share it."""
    scale_bits: int = 0
    """Of one group's scale, and zero point if it has one."""
    ends_wide: bool = False
    """First and last layer stay floats."""
    kernel_multiple: int = 1
    """Inputs are padded to this many for the kernels (see ``padded``)."""

    @property
    def is_mx(self) -> bool:
        return self.name.startswith("mxfp4")

    def is_small(self, matrix: Matrix) -> bool:
        return matrix.part in self.parts

    def bytes_of(self, matrix: Matrix, *, wide: bool = False) -> int:
        """Bytes of a (local) matrix; ``wide``: as a float, whatever the format says of its part."""
        if wide or not self.is_small(matrix):
            return matrix.elements * self.wide
        cols = -(-matrix.cols // self.kernel_multiple) * self.kernel_multiple
        groups = -(-cols // self.group) if self.group else 1
        scales = groups * -(-matrix.rows // self.group_rows) * self.scale_bits
        bits = matrix.rows * cols * self.bits + scales
        return matrix.copies * -(-bits // 8)

    def padded(self, multiple: int) -> WeightFormat:
        """The same with inputs padded to a multiple, as some kernels want them."""
        return msgspec.structs.replace(self, kernel_multiple=multiple)


def _float(name: str) -> WeightFormat:
    width = FLOATS[name]
    return WeightFormat(
        name=name, bits=8 * width, wide=width, parts=frozenset(), source="IEEE 754, bfloat16"
    )


_FP8 = WeightFormat(
    name="fp8", bits=8, scale_bits=32, source="llm-compressor FP8-dynamic: a scale a row"
)
_GROUPED = WeightFormat(
    name="awq", bits=4, group=128, scale_bits=20, source="AWQ, arXiv:2306.00978"
)
_MX = WeightFormat(
    name="mxfp4", bits=4, group=32, scale_bits=8, source="OCP Microscaling Formats 1.0"
)
_as = msgspec.structs.replace
_FORMATS = (
    *map(_float, FLOATS),
    _FP8,
    _as(
        _FP8,
        name="fp8-block",
        group=128,
        group_rows=128,
        source="DeepSeek-V3, arXiv:2412.19437 section 3.3: blocks of 128 x 128",
    ),
    _as(
        _FP8,
        name="fp8-mlp-only",
        parts=frozenset({"mlp", "shared", "expert"}),
        ends_wide=True,
        source="Llama 3, arXiv:2407.21783 section 6.2: attention, first and last layer stay bf16",
    ),
    _as(_FP8, name="int8", source="one scale a row"),
    _as(_FP8, name="w8a8", source="llm-compressor W8A8: a scale a row"),
    _as(_GROUPED, name="int4", scale_bits=32, source="groups of 128, scale and minimum fp16"),
    _as(_GROUPED, name="w4a16", scale_bits=16, source="compressed-tensors, symmetric"),
    _GROUPED,
    _as(_GROUPED, name="gptq", source="GPTQ, arXiv:2210.17323"),
    _as(_MX, name="nvfp4", group=16, source="NVIDIA NVFP4: an fp8 scale for 16 numbers"),
    _MX,
    _as(_MX, name="mxfp4-moe", parts=frozenset({"expert"})),
)
FORMATS = {found.name: found for found in _FORMATS}
_ALIASES = {
    "gptq-int4": "gptq",
    "awq-int4": "awq",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "fp4": "nvfp4",
    "int4-g128": "awq",
    "w8a16": "int8",
    "fp8-dynamic": "fp8",
    "compressed-tensors": "w4a16",
}
UNKNOWN = ("", "?", "nan", "unknown")
"""Words with which tables say that nobody knows."""


def weight_format(name: str) -> WeightFormat:
    """The format called ``name``; case and underscores do not matter.

    Raises:
        SetupError: it is not known; the message has those that are, the nearest first.
    """
    plain = _plain(name)
    if (found := FORMATS.get(_ALIASES.get(plain, plain))) is not None:
        return found
    raise unknown("weight format", name, FORMATS, plain)


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


KV_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}
"""Of one element of a KV cache."""
SCALE_BYTES = 4
"""Of the float32 that this engine keeps behind each key and value of single bytes."""
_KV_ALIASES = {"auto": "bf16", "fp8-e4m3": "fp8", "fp8-e5m2": "fp8", **_ALIASES}


def kv_format(name: str) -> str:
    """A key of ``KV_BYTES``.

    Raises:
        SetupError: it is none; the message has those that there are.
    """
    plain = _plain(name)
    if (found := _KV_ALIASES.get(plain, plain)) in KV_BYTES:
        return found
    raise SetupError(f"KV dtype {name!r} is not known: choose one of {', '.join(KV_BYTES)}")


_PUBLISHED = {"mxfp4": "mxfp4-moe", "modelopt": "nvfp4", "fbgemm_fp8": "fp8"}
"""Values of ``quantization_config.quant_method``, and the format that they come nearest."""
_EIGHT_BITS = {"gptq": "int8", "awq": "int8", "bitsandbytes": "int8", "modelopt": "fp8"}
"""The same where the config states 8 bits."""
_GROUPS = {("float", 8): "fp8", ("float", 4): "nvfp4", ("int", 8): "int8", ("int", 4): "w4a16"}
"""Of compressed-tensors: type and bits of a group's weights."""


def quantised_as(config: Mapping[str, Any]) -> str:
    """What ``published`` takes as the method, of a ``quantization_config``; empty for an empty one.
    Bits for which there is no format become a name that nothing has."""
    method = str(config.get("quant_method") or "")
    if groups := list(dict(config.get("config_groups") or {}).values()):
        return _grouped(method, groups[0])
    if method == "fp8":
        return "fp8-block" if config.get("weight_block_size") else "fp8"
    bits = config.get("bits") or (8 if config.get("load_in_8bit") else 0)
    if bits == 8 or str(config.get("quant_algo") or "").upper().startswith("FP8"):
        return _EIGHT_BITS.get(method, method)
    if bits not in (0, 4):
        return f"{method} of {bits} bits"
    return "int4" if method == "bitsandbytes" else method


def _grouped(method: str, group: Mapping[str, Any]) -> str:
    """Of compressed-tensors and what follows it: groups of layers, nearly always one."""
    weights = group.get("weights") or {}
    kind = str(weights.get("type") or "int"), weights.get("num_bits") or 4
    if kind == ("float", 8) and weights.get("strategy") == "block":
        return "fp8-block"
    if kind == ("int", 8) and group.get("input_activations"):
        return "w8a8"
    return _GROUPS.get(kind, f"{method} of {kind[1]} bits ({kind[0]})")


_PUBLISHED_SMALL = {"deepseek_v3": "fp8-block", "kimi_k2": "fp8-block", "gpt_oss": "mxfp4-moe"}
"""Families that were only published so, whatever a table's config leaves out."""


def published(quant_method: str, dtype: str, model_type: str) -> WeightFormat:
    """The format in which a model was published, by what its config says.

    Raises:
        SetupError: as ``weight_format``.
    """
    if quant_method:
        return weight_format(_PUBLISHED.get(quant_method, quant_method))
    return weight_format(_PUBLISHED_SMALL.get(model_type, dtype))
