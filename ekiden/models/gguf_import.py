"""GGUF in, Hugging Face directory out: weights in bf16, config, tokenizer, chat template.

1. ``gguf_config`` turns the file's metadata into a Llama ``config.json``.
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
from ekiden.models.gguf_config import ROPE_FACTORS, read_geometry, rope_scaling, special_ids
from ekiden.models.gguf_reader import Metadata, open_gguf
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
    reader = open_gguf(source)
    meta = Metadata(reader)
    config = read_geometry(meta)
    planned = plan_tensors(reader.tensors, config)
    config["tie_word_embeddings"] = all(p.name != "lm_head.weight" for p in planned)
    config |= rope_scaling(meta, reader.tensors, config)
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(meta, out, int(config["vocab_size"]), tokenizer_dir)
    write_weights(reader.tensors, planned, out / "model.safetensors", progress)
    _write_json(out / "config.json", config | special_ids(meta))
    _write_json(out / "generation_config.json", special_ids(meta))


def plan_tensors(tensors: list[Any], config: dict[str, Any]) -> list[Planned]:
    """Every tensor's name and shape. Raises SetupError for one unknown, and for one missing."""
    planned = [
        _planned(index, tensor, config)
        for index, tensor in enumerate(tensors)
        if tensor.name != ROPE_FACTORS
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
