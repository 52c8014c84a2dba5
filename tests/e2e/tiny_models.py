"""Checkpoints of a megabyte in any shape, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stack import TinyModel
from tiny_tokenizers import byte_level, write

LLAMA: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": True}


def save_model(path: Path, fields: dict[str, Any]) -> TinyModel:
    """Four layers with random weights, large enough for tokens to differ, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_level()
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4}
    config = AutoConfig.for_model(
        **shape,
        **fields,
        vocab_size=tokenizer.get_vocab_size(),
        initializer_range=0.2,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path)
    write(path, tokenizer)
    return TinyModel(directory=path, reference=model)
