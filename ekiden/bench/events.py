"""Server-sent events, as the servers of language models send them: bytes in, values out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ekiden.bench.record import Account

DONE = b"[DONE]"
MAX_EVENT = 1 << 24
"""Bytes; who sends more without an end is not sending events."""


class BadStream(Exception):
    """An answer that began well and is worth nothing; ``kind`` is one of ``record.ERRORS``."""

    kind = "malformed"


class Malformed(BadStream):
    """What came is no stream of events of this kind; says what it is instead."""


class ErrorEvent(BadStream):
    """The server ended the stream with an error."""

    kind = "stream_error"


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ekiden: Any = None

    def account(self) -> Account | None:
        """Our gateway's account; None of another server, or of a shape that is not ours."""
        if not isinstance(self.ekiden, dict):
            return None
        try:
            ours = msgspec.convert(self.ekiden, _Ours)
        except msgspec.ValidationError:
            return None
        return Account(
            sources={k: v for k, v in ours.sources.items() if isinstance(v, int)},
            times=ours.times,
            prefill_replica=ours.prefill_replica,
            decode_replica=ours.decode_replica,
            wire=ours.transfer.wire,
            moved_bytes=ours.transfer.bytes,
            fallbacks=tuple(f.kind for f in ours.fallbacks),
        )


class _Transfer(msgspec.Struct, frozen=True):
    bytes: int = 0
    wire: str = ""


class _Fallback(msgspec.Struct, frozen=True):
    kind: str


class _Ours(msgspec.Struct, frozen=True):
    sources: dict[str, int | str] = {}
    times: dict[str, float] = {}
    transfer: _Transfer = _Transfer()
    fallbacks: list[_Fallback] = []
    prefill_replica: str = ""
    decode_replica: str = ""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning
        )


class Event(msgspec.Struct, frozen=True):
    """A chunk of a completion or of a chat; ``error`` where the server gave up."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        return any(choice.has_text for choice in self.choices)

    @property
    def finishes(self) -> bool:
        return any(choice.finish_reason for choice in self.choices)

    @classmethod
    def of(cls, data: bytes) -> Event:
        """Raises Malformed when the JSON is none, or not of a chunk."""
        try:
            return _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(f"an event is no chunk ({error}): {data[:80]!r}") from None


_DECODER = msgspec.json.Decoder(Event)


class EventLines:
    """Cuts a stream into the data of its events, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._kept = b""
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that ends within ``piece``.

        Raises:
            Malformed: an event is longer than ``MAX_EVENT``, or a line is none of an event.
        """
        *lines, self._kept = (self._kept + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._held += len(line)
            elif not line and self._data:
                data, self._data, self._held = b"\n".join(self._data), [], 0
                yield data
            elif line and b":" not in line:
                raise Malformed(f"a line that is none of an event: {line[:80]!r}")
        if len(self._kept) + self._held > MAX_EVENT:
            raise Malformed(f"an event of more than {MAX_EVENT} bytes")
