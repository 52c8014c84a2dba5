"""Token ids to text, one token at a time, in time linear in the output.

The joined pieces equal the ``tokenizers`` library's decoding of the whole sequence, malformed
bytes included, and a piece never ends inside a character: bytes wait until the character they
belong to is whole, or until it is certain that it never will be (then U+FFFD stands for them).
"""

from __future__ import annotations

import codecs
from typing import Protocol

from ekiden.text.tokenizer import (
    METASPACE,
    DecoderKind,
    Tokenizer,
    byte_level_bytes,
    fallback_byte,
)


class IncrementalDetokenizer:
    """The text of one choice. Special tokens have no text.

    An output continues a prompt, so a leading space that a SentencePiece-style tokenizer would
    strip from the start of a text is kept: the output of ``Hello`` + ``▁world`` is ``" world"``.
    ``at_start=True`` gives the text of a sequence that nothing comes before.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stream = _open_stream(tokenizer.kind)
        self._strip = at_start and tokenizer.strips_first_space

    def push(self, token: int) -> str:
        """The text that is certain now that ``token`` has come; often ``""``."""
        if self._tokenizer.is_special(token):
            return ""
        piece = self._tokenizer.piece(token)
        return self._stripped(self._stream.push(piece)) if piece else ""

    def flush(self) -> str:
        """What is still held back, now that no token will come."""
        return self._stripped(self._stream.flush())

    def _stripped(self, text: str) -> str:
        if not (self._strip and text):
            return text
        self._strip = False
        return text.removeprefix(" ")


class _Stream(Protocol):
    def push(self, piece: str) -> str: ...

    def flush(self) -> str: ...


def _open_stream(kind: DecoderKind) -> _Stream:
    match kind:
        case DecoderKind.BYTE_LEVEL:
            return _ByteLevel()
        case DecoderKind.BYTE_FALLBACK:
            return _ByteFallback()
        case DecoderKind.WORDS:
            return _Words()


class _ByteLevel:
    """Bytes to characters; the codec keeps the bytes of an unfinished character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> str:
        return self._decoder.decode(byte_level_bytes(piece))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallback:
    """Text tokens pass; a run of byte tokens is text only if the whole run is UTF-8.

    The library replaces every byte of a run that has one bad byte, so a run is certain only
    when it ends. Words of a script outside the vocabulary still stream: a space ends a run.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> str:
        value = fallback_byte(piece)
        if value is None:
            return self.flush() + piece.replace(METASPACE, " ")
        self._run.append(value)
        return ""

    def flush(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


class _Words:
    def __init__(self) -> None:
        self._first = True

    def push(self, piece: str) -> str:
        lead, self._first = "" if self._first else " ", False
        return lead + piece

    def flush(self) -> str:
        return ""
