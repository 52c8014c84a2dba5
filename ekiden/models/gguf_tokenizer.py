"""The tokenizer of a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``.

Byte-level BPE only: vocabulary and merges stand in the file, and ``tokenizer.ggml.pre`` names
how text is cut before merging. A name that is not in ``_SPLITS`` is refused, because a guess
would give other tokens on some texts and nobody would notice.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiden.core.errors import SetupError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ekiden.models.gguf_reader import Metadata

_GPT2 = "byte-level regex"
_DIGITS = "single digits, then byte-level regex"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
}
_LLAMA3_NAMES = ("llama-bpe", "llama3")
_CONTROL, _USER_DEFINED = 3, 4
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_tokenizer(
    meta: Metadata, out: Path, vocab_size: int, tokenizer_dir: Path | None = None
) -> None:
    """Write the tokenizer's files into ``out``; raises SetupError if it cannot be exact."""
    if tokenizer_dir is not None:
        _copy(tokenizer_dir, out)
        return
    tokenizer = build_tokenizer(meta)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise SetupError(f"the GGUF vocabulary has {vocab_size} entries, {size} of them distinct")
    tokenizer.save(str(out / "tokenizer.json"))
    text = json.dumps(_config(meta), indent=2, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _copy(source: Path, out: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        raise SetupError(f"--tokenizer {source} holds no tokenizer.json")
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def build_tokenizer(meta: Metadata) -> Tokenizer:
    """Byte-level BPE from the file's tokens, merges and token types."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    if (kind := meta.need("tokenizer.ggml.model")) != "gpt2":
        raise SetupError(
            f"tokenizer.ggml.model {kind!r} cannot be rebuilt: only 'gpt2' (byte-level BPE) can; "
            "pass --tokenizer DIR with the original tokenizer.json"
        )
    tokens = meta.need("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ", 1)) for m in meta.need("tokenizer.ggml.merges")]
    split = _split_name(meta)
    # Llama 3 knows whole words that its merges do not reach.
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        ignore_merges=split in _LLAMA3_NAMES,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    for token, mark in zip(tokens, meta.need("tokenizer.ggml.token_type"), strict=True):
        if mark in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=mark == _CONTROL)
            tokenizer.add_tokens([added])
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), *_begin(meta, split)]
    )
    return tokenizer


def _split_name(meta: Metadata) -> str:
    return str(meta.get("tokenizer.ggml.pre", "absent"))


def _begin(meta: Metadata, split: str) -> list[Any]:
    """What puts the begin token first, where the model was trained with one."""
    from tokenizers import processors

    if not _adds_bos(meta, split):
        return []
    bos_id = int(meta.need("tokenizer.ggml.bos_token_id"))
    bos = meta.need("tokenizer.ggml.tokens")[bos_id]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_id)]
    )
    return [template]


def _adds_bos(meta: Metadata, split: str) -> bool:
    return bool(meta.get("tokenizer.ggml.add_bos_token", split in _LLAMA3_NAMES))


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if name not in _SPLITS:
        raise SetupError(
            f"tokenizer.ggml.pre {name!r} is unknown: one of {', '.join(sorted(_SPLITS))}, "
            "or pass --tokenizer DIR with the original tokenizer.json"
        )
    split = _SPLITS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == _GPT2:
        return byte_level
    if split == _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    regex = pre_tokenizers.Split(Regex(split), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([regex, bytes_only])


def _config(meta: Metadata) -> dict[str, Any]:
    tokens = meta.need("tokenizer.ggml.tokens")
    ids = {
        "bos_token": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token": meta.get("tokenizer.ggml.eos_token_id"),
        "unk_token": meta.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": meta.get("tokenizer.ggml.padding_token_id"),
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(meta, _split_name(meta)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta.get("llama.context_length", 0)),
    }
    config |= {name: tokens[i] for name, i in ids.items() if i is not None}
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
