"""Tiny real tokenizers of both decoder kinds, for any test."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

TRAINING = [
    "hello world, the quick brown fox",
    "ďábel 汉字 👩‍👩‍👧 naïve",
    "STOP stop </s> ab abc",
] * 4
SPECIALS = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]


def write(directory: Path, inner: tokenizers.Tokenizer, **settings: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_level() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
    )
    inner.train_from_iterator(TRAINING, trainer)
    inner.add_tokens([AddedToken("<think>", special=False), AddedToken("</ý>", special=False)])
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "▁hello", "ab", "汉", "."):
        vocab[piece] = len(vocab)
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens(SPECIALS)
    inner.add_tokens([AddedToken("<think>", special=False)])
    return inner
