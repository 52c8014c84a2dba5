"""GGUF in, Hugging Face directory out: weights in bf16, config, tokenizer, chat template.

1. ``read_geometry`` turns the file's metadata into a Llama ``config.json``.
2. ``plan_tensors`` names every tensor of the file in Hugging Face's words; one that has no
   name there is refused, so nothing is dropped in silence.
3. ``write_weights`` dequantises one tensor at a time and streams it to ``model.safetensors``:
   memory stays at one tensor, and no torch is needed.
4. ``gguf_tokenizer`` rebuilds the tokenizer.

llama.cpp stores the rows of q and k with each head's two RoPE halves interleaved; ``unpermute``
puts them back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ekiden.core.errors import SetupError
from ekiden.models.gguf_tokenizer import write_tokenizer

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all)."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_FACTORS = "rope_freqs.weight"


class Metadata:
    """The key-value part of a GGUF file; a missing required key is a SetupError that names it."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        if key not in self._fields:
            raise SetupError(f"the GGUF file has no field {key!r}; it cannot be imported")
        return self.get(key)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: its index in the file, its Hugging Face name and shape, heads to unpermute."""

    index: int
    name: str
    shape: tuple[int, ...]
    rope_heads: int = 0

    @property
    def nbytes(self) -> int:
        """Size in bf16."""
        return 2 * int(np.prod(self.shape))


def import_gguf(
    source: Path, out: Path, *, tokenizer_dir: Path | None = None, progress: Progress | None = None
) -> None:
    """Write the Hugging Face directory ``out`` (made if missing) from the GGUF file ``source``.

    ``tokenizer_dir`` takes the tokenizer from that directory instead of from the file. Raises
    SetupError for a file that is not GGUF, another architecture, a feature that Llama's
    ``config.json`` cannot say, or a tokenizer kind that cannot be rebuilt exactly.
    """
    reader = _open(source)
    meta = Metadata(reader)
    config = read_geometry(meta)
    planned = plan_tensors(reader.tensors, config)
    config["tie_word_embeddings"] = all(p.name != "lm_head.weight" for p in planned)
    config |= _rope(meta, reader.tensors, config)
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(meta, out, int(config["vocab_size"]), tokenizer_dir)
    write_weights(reader.tensors, planned, out / "model.safetensors", progress)
    _write_json(out / "config.json", config | _special_ids(meta))
    _write_json(out / "generation_config.json", _special_ids(meta))


def _open(source: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise SetupError("reading GGUF needs the package gguf: install ekiden[models]") from error
    if not source.is_file():
        raise SetupError(f"GGUF file {source} does not exist")
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise SetupError(f"{source} is not a whole GGUF file: {error}") from error


def read_geometry(meta: Metadata) -> dict[str, Any]:
    """``config.json`` of a Llama model, all but ties, RoPE scaling and special ids."""
    if (family := meta.need("general.architecture")) != "llama":
        raise SetupError(f"GGUF architecture {family!r} is not supported: only 'llama' is")
    if experts := meta.get("llama.expert_count", 0):
        raise SetupError(f"llama.expert_count is {experts}: mixtures of experts are not supported")
    heads = int(meta.need("llama.attention.head_count"))
    hidden = int(meta.need("llama.embedding_length"))
    head_dim = int(meta.get("llama.attention.key_length", hidden // heads))
    rotary = int(meta.get("llama.rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise SetupError(f"llama.rope.dimension_count {rotary} differs from head dim {head_dim}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(meta.need("llama.feed_forward_length")),
        "max_position_embeddings": int(meta.need("llama.context_length")),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(meta.need("llama.block_count")),
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "rms_norm_eps": _decimal(meta.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(meta.get("llama.rope.freq_base", 10000.0)),
        "torch_dtype": "bfloat16",
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
    }


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32, so that 1e-5 is written as 1e-5."""
    return float(str(np.float32(value)))


def _special_ids(meta: Metadata) -> dict[str, Any]:
    """Ids of begin, end and padding. The end may be a list: end of text, turn and message."""
    ends = [meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(int(end) for end in ends if end is not None))
    ids = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _rope(meta: Metadata, tensors: list[Any], config: dict[str, Any]) -> dict[str, Any]:
    """``rope_scaling``, from the scaling fields or from the frequency factors of Llama 3.1."""
    kind = meta.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        factor = _decimal(meta.need("llama.rope.scaling.factor"))
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "none":
        raise SetupError(f"llama.rope.scaling.type {kind!r} is not supported: none or linear")
    for tensor in tensors:
        if tensor.name == _FACTORS:
            return {"rope_scaling": _llama3_scaling(np.asarray(tensor.data), config)}
    return {}


def _llama3_scaling(factors_D: npt.NDArray[np.float32], config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's parameters whose frequency factors are these, or SetupError.

    factors_D: float32 [head_dim / 2], by which each inverse frequency is divided.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors_D.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected_D = _llama3_factors(scaling, config["rope_theta"], config["head_dim"])
    if factors_D.shape != expected_D.shape or not np.allclose(factors_D, expected_D, rtol=1e-3):
        raise SetupError(f"the RoPE factors in {_FACTORS} are not those of Llama 3's scaling")
    return scaling


def _llama3_factors(scaling: dict[str, Any], theta: float, dim: int) -> npt.NDArray[np.float64]:
    """Float64 [dim / 2]: what Llama 3.1 divides its inverse frequencies by."""
    wavelength_D = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_D = scaling["original_max_position_embeddings"] / wavelength_D
    smooth_D = np.clip((turns_D - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth_D) / scaling["factor"] + smooth_D)  # type: ignore[no-any-return]


def plan_tensors(tensors: list[Any], config: dict[str, Any]) -> list[Planned]:
    """Every tensor's name and shape. Raises SetupError for one unknown, and for one missing."""
    planned = [
        _planned(index, tensor, config)
        for index, tensor in enumerate(tensors)
        if tensor.name != _FACTORS
    ]
    layers = range(config["num_hidden_layers"])
    wanted = {f"model.layers.{i}.{name}" for i in layers for name in _BLOCK.values()}
    wanted |= {"model.embed_tokens.weight", "model.norm.weight"}
    if missing := sorted(wanted - {p.name for p in planned}):
        raise SetupError(f"the GGUF file lacks {len(missing)} tensors, first {missing[0]!r}")
    return planned


def _planned(index: int, tensor: Any, config: dict[str, Any]) -> Planned:
    name = _hugging_face_name(tensor.name)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return Planned(
        index=index,
        name=name,
        shape=tuple(int(n) for n in reversed(tensor.shape)),
        rope_heads=heads.get(name.split(".")[-2], 0),
    )


def _hugging_face_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}"
    raise SetupError(f"tensor {name!r} of the GGUF file has no place in a Llama model")


def unpermute(weight_OI: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k back from llama.cpp's order: in each head, even rows, then odd rows.

    weight_OI: [heads * head_dim, hidden].
    """
    rows, columns = weight_OI.shape
    pairs = weight_OI.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of bfloat16, rounded to nearest even. Values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_weights(
    tensors: list[Any], planned: list[Planned], path: Path, progress: Progress | None
) -> None:
    """Stream the tensors to a safetensors file: 8 bytes of length, JSON header, data in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for item in planned:
        span = [total, total := total + item.nbytes]
        header[item.name] = {"dtype": "BF16", "shape": item.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for item in planned:
            file.write(_dequantised(tensors[item.index], item).tobytes())
            done += item.nbytes
            if progress:
                progress(done, total)


def _dequantised(tensor: Any, item: Planned) -> npt.NDArray[np.uint16]:
    from gguf.quants import dequantize

    weight = dequantize(tensor.data, tensor.tensor_type).reshape(item.shape)
    if not np.isfinite(weight).all():
        raise SetupError(f"tensor {tensor.name!r} of the GGUF file holds values that are no number")
    return to_bf16(unpermute(weight, item.rope_heads) if item.rope_heads else weight)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
