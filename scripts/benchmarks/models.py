"""The models that are measured: where they lie, and the least work that a step of each takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import Machine
from benchmarks.results import FOLDER
from benchmarks.work import Decode, Prefill, Work

SMOLLM2 = "smollm2-135m-instruct"
RANDOM_1B = "random-1.1b"
MODELS = (SMOLLM2, RANDOM_1B)
CACHE = FOLDER / "models"
SEED = 20260101
BF16_BITS = 16.0
KV_BYTES = 2
"""Of one number of the cache."""
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    # TinyLlama's 2,048 would not hold a prompt of 2,048 tokens and an answer.
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_dir(name: str) -> Path:
    """Where ``name`` lies, made or fetched first if it is not there. A path stands for itself."""
    if name == RANDOM_1B:
        return random_llama(CACHE / RANDOM_1B)
    from ekiden.cli.models import resolve

    return resolve(name)


def random_llama(path: Path, **shape: Any) -> Path:
    """A Llama of TinyLlama's shape in bf16: random weights from a seed, a made-up tokenizer.

    ``shape`` overrules fields of its config.json. A finished one is left as it is.
    """
    if (path / "tokenizer.json").is_file():
        return path
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    print(f"making {path} (once)", flush=True)
    torch.manual_seed(SEED)
    config = LlamaConfig(**{**LLAMA_1B, **shape})
    model: Any = LlamaForCausalLM
    model._from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    _write_tokenizer(path, config.vocab_size)
    return path


def _write_tokenizer(path: Path, size: int) -> None:
    """Bytes, and words that no text holds: enough for whatever asks for a tokenizer."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [f"word{number}" for number in range(size - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (path / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    tokenizer.save(str(path / "tokenizer.json"))  # last: it says that all is there


class Shape(NamedTuple):
    """What decides the least work of a step."""

    layer_weights: int
    """Of all layers, biases and norms left out."""
    head_weights: int
    layers: int
    attention_width: int
    """Query heads times head_dim."""
    kv_width: int
    """Key heads times head_dim."""

    @classmethod
    def of(cls, path: Path) -> Shape:
        """Read from the config.json of a Llama."""
        c = json.loads((path / "config.json").read_text())
        hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
        head_dim = c.get("head_dim") or hidden // heads
        q, kv = heads * head_dim, c["num_key_value_heads"] * head_dim
        one = hidden * (2 * q + 2 * kv) + 3 * hidden * c["intermediate_size"]
        return cls(layers * one, hidden * c["vocab_size"], layers, q, kv)

    def least_seconds(self, work: Work, machine: Machine, bits: float = BF16_BITS) -> float:
        """No less than the bytes over the read rate, nor the operations over the GEMM rate.

        Every weight is read once, the cache of every token once a step; embeddings, norms, rope
        and all writing are taken to be free. ``bits`` are those of one weight.
        """
        tokens, positions, pairs, logits = _amounts(work)
        weights = self.layer_weights + self.head_weights
        moved = weights * bits / 8 + positions * 2 * self.kv_width * self.layers * KV_BYTES
        operations = 2 * tokens * self.layer_weights + 2 * logits * self.head_weights
        operations += 4 * pairs * self.attention_width * self.layers
        return max(moved / machine.bytes_per_s, operations / machine.flops_per_s)

    def ceiling(self, work: Work, machine: Machine, bits: float = BF16_BITS) -> float:
        """Tokens a second at best."""
        return work.tokens / self.least_seconds(work, machine, bits)


def _amounts(work: Work) -> tuple[int, int, int, int]:
    """Tokens computed, cached positions read, pairs of query and key, rows of logits."""
    match work:
        case Prefill(prompt):
            return prompt, 0, prompt * (prompt + 1) // 2, 1
        case Decode(batch, context):
            return batch, batch * context, batch * context, batch
