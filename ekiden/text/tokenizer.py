"""A Hugging Face tokenizer directory, without transformers and without torch.

Encoding is the ``tokenizers`` library's. Decoding token by token is ours (``detokenize.py``), so
this module also knows how the model's decoder turns one token into bytes or text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from ekiden.core.errors import SetupError

METASPACE = "▁"


class DecoderKind(StrEnum):
    """How a tokenizer joins its tokens to text."""

    BYTE_LEVEL = "byte-level"
    """Every token is a run of bytes (GPT-2, Llama 3, Qwen, SmolLM2)."""
    BYTE_FALLBACK = "byte-fallback"
    """Tokens are text with ``▁`` for a space, rare characters are ``<0xHH>`` tokens (Llama 2)."""
    WORDS = "words"
    """No decoder: tokens are joined by a space."""


class Tokenizer:
    """``tokenizer.json`` and its settings. Immutable and safe to share between threads.

    ``vocab_size`` counts added tokens. ``eos_ids`` are the ids that end a text: the model's
    ``generation_config.json`` and ``config.json`` and the tokenizer's own EOS, joined.
    ``fingerprint`` is the SHA-256 of ``tokenizer.json``, as the workers register it.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        settings: Mapping[str, Any],
        eos: Sequence[int] = (),
        fingerprint: str = "",
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        description = msgspec.json.decode(inner.to_str())
        self.settings = settings
        self.kind, self.strips_first_space = _decoder_kind(description.get("decoder"))
        self.fingerprint = fingerprint
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        added = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_ids = frozenset(eos) | self._named_ids("eos_token")

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read a model directory.

        Raises:
            SetupError: ``tokenizer.json`` is missing or unreadable, or its decoder is of a kind
                that cannot be decoded token by token.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SetupError(
                f"{directory} has no tokenizer.json: name a model directory with a Hugging Face "
                "fast tokenizer"
            )
        data = path.read_bytes()
        try:
            inner = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise SetupError(f"{path} cannot be read as a tokenizer: {error}") from None
        settings = _read_object(directory / "tokenizer_config.json")
        eos: list[int] = []
        for name in ("generation_config.json", "config.json"):
            eos += _id_list(_read_object(directory / name).get("eos_token_id"))
        fingerprint = hashlib.sha256(data).hexdigest()
        return cls(inner, settings=settings, eos=eos, fingerprint=fingerprint)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. ``add_special_tokens`` adds what the model begins a text with."""
        # Unlike ``encode``, the batch call lets other threads run, and it is twice as fast.
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids outside the vocabulary have no text."""
        return self._inner.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def piece(self, token: int) -> str:
        """The token as the vocabulary spells it (``Ġthe``, ``<0xE2>``), ``""`` if unknown."""
        return self._inner.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for inside a text; for a special token, its name."""
        piece = self.piece(token)
        match self.kind:
            case DecoderKind.BYTE_LEVEL:
                return byte_level_bytes(piece)
            case DecoderKind.WORDS:
                return piece.encode()
        value = fallback_byte(piece)
        return bytes([value]) if value is not None else piece.replace(METASPACE, " ").encode()

    def special_texts(self) -> dict[str, str]:
        """``bos_token`` and the like, as chat templates want them."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        texts = {name: _token_text(self.settings.get(name)) for name in names}
        return {name: text for name, text in texts.items() if text is not None}

    def _named_ids(self, name: str) -> frozenset[int]:
        text = _token_text(self.settings.get(name))
        token = None if text is None else self._inner.token_to_id(text)
        return frozenset() if token is None else frozenset((token,))


@lru_cache(1 << 16)  # of a few characters each; the same tokens come again and again
def byte_level_bytes(piece: str) -> bytes:
    """Undo GPT-2's printable alphabet; a piece outside that alphabet stands for itself."""
    table = _byte_level_table()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:
        return piece.encode()


def fallback_byte(piece: str) -> int | None:
    """The value of a ``<0xHH>`` token, None for any other."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


@cache
def _byte_level_table() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(rest)})
    return table


def _decoder_kind(decoder: dict[str, Any] | None) -> tuple[DecoderKind, bool]:
    """The kind, and whether the first space of a text is stripped."""
    if decoder is None:
        return DecoderKind.WORDS, False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL, False
    plain = [name for name in names if name not in ("Fuse", "Strip")]
    if plain == ["Replace", "ByteFallback"] and _replaces_metaspace(steps[0]):
        return DecoderKind.BYTE_FALLBACK, _strips_one_space(steps)
    raise SetupError(
        f"the tokenizer's decoder {'+'.join(names)} cannot be decoded token by token: use a "
        "tokenizer with a ByteLevel or a Replace+ByteFallback+Fuse decoder"
    )


def _replaces_metaspace(step: dict[str, Any]) -> bool:
    return (step["pattern"], step["content"]) == ({"String": METASPACE}, " ")


def _strips_one_space(steps: list[dict[str, Any]]) -> bool:
    strips = [step for step in steps if step["type"] == "Strip"]
    if not strips:
        return False
    shape = [(step["content"], step["start"], step["stop"]) for step in strips]
    if shape != [(" ", 1, 0)]:
        raise SetupError(f"the tokenizer strips {shape}: only one leading space is supported")
    return True


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} is not a JSON object: {error}") from None


def _id_list(value: object) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []


def _token_text(value: object) -> str | None:
    """tokenizer_config.json writes a token as a string or as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
