"""Small GGUF files, made from Hugging Face Llama weights in llama.cpp's order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CHATML = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of GPT-2's byte-level alphabet, in order of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(extra)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges): two control tokens, the bytes, and three merges."""
    tokens = ["<|end|>", "<|im_end|>", *byte_tokens(), "he", "hel", "12"]
    return tokens, ["h e", "he l", "1 2"]


CONFIG: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": len(vocabulary()[0]),
}


def random_weights() -> dict[str, np.ndarray]:
    """Untied weights for ``CONFIG``, by Hugging Face name, that bf16 holds exactly."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q, kv = (
        CONFIG["head_dim"] * CONFIG[f"num_{kind}_heads"] for kind in ("attention", "key_value")
    )
    vocab = CONFIG["vocab_size"]
    block = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,),
              "lm_head": (vocab, hidden)}  # fmt: skip
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    chance = np.random.default_rng(7)
    return {
        f"{name}.weight": chance.integers(-64, 64, shape).astype(np.float32) / 64
        for name, shape in shapes.items()
    }


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores them: the two RoPE halves of each head taken in turn."""
    rows = weight.shape[0] // heads
    order = [h * rows + half * (rows // 2) + i for h in range(heads) for i in range(rows // 2)
             for half in (0, 1)]  # fmt: skip
    return weight[order]


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    *,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    packed: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    skip: str = "",
) -> Path:
    """``fields`` overrides: a value sets, None leaves out. ``weights`` by Hugging Face name,
    ``extra`` and ``packed`` (bytes and their kind) by GGUF name."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in ({**default_fields(config), **(fields or {})}).items():
        add_field(writer, key, value)
    for name, weight in weights.items():
        heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }.get(name.split(".")[-2], 0)
        if name != skip:
            writer.add_tensor(gguf_name(name), permute(weight, heads) if heads else weight)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    for name, (data, kind) in (packed or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").removeprefix("model.")
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    if parts in top:
        return f"{top[parts]}.weight"
    _, layer, rest = parts.split(".", 2)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None or key == "general.architecture":
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(key, value)


def default_fields(config: dict[str, Any]) -> dict[str, Any]:
    tokens, merges = vocabulary()
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHATML,
    }
