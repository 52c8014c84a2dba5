"""``--model tiny``: a Llama of random weights, written in a moment, for grids of many layouts.

Weights are drawn so that every layer keeps the size of its input. Small ones, as training begins
with, would leave the next token to the last one alone: no fault in the KV could be seen in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 3, 96, 160, 6, 3, 16
"""Three KV heads: TP 2 splits them unevenly, TP 4 keeps one twice. Three layers: so does PP 2."""
SPECIALS = ["<s>", "</s>"]


def write_tiny_model(directory: Path, seed: int = 0) -> Path:
    """Write config.json, model.safetensors and tokenizer.json into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    vocab = tokenizer.get_vocab_size()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in _shapes(vocab)
    }
    norms = {name: torch.ones(HIDDEN) for name in _norms()}
    weights["model.embed_tokens.weight"] *= HIDDEN**0.5
    save_file(weights | norms, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _shapes(vocab: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "model.embed_tokens.weight", (vocab, HIDDEN)
    yield "lm_head.weight", (vocab, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{at}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{at}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{at}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, INNER)


def _norms() -> Iterator[str]:
    yield "model.norm.weight"
    for layer in range(LAYERS):
        yield f"model.layers.{layer}.input_layernorm.weight"
        yield f"model.layers.{layer}.post_attention_layernorm.weight"


def _tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, and the two that begin and end a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*SPECIALS, *alphabet])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(SPECIALS)
    return inner
