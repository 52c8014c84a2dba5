"""The JSON of both endpoints: chunks of a stream and whole answers.

Chunks are put together from bytes templates; only the text goes through a JSON encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from ekiden.core.types import Completion, TokenLogprobs
from gateway.openai.choice import LogprobText, Piece

DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """What differs between chat and completions."""

    prefix: str
    """Of the answer's id."""
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> bytes | None:
        """The choice of the first chunk, if the endpoint has one before any text."""

    def text(self, piece: Piece, logprobs: bytes) -> bytes:
        """The choice of a chunk that brings text."""

    def closing(self, piece: Piece, logprobs: bytes) -> bytes:
        """The choice of the chunk that says why the choice ended."""

    def logprobs(self, entries: Sequence[TokenLogprobs], text: LogprobText) -> dict[str, Any]: ...

    def whole(self, text: str, last: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""


class ChatShape:
    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> bytes | None:
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}' % index
        )

    def text(self, piece: Piece, logprobs: bytes) -> bytes:
        return b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (
            piece.index,
            orjson.dumps(piece.text),
            logprobs,
        )

    def closing(self, piece: Piece, logprobs: bytes) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":%b,"finish_reason":%b,"stop_reason":%b}' % (
            piece.index,
            logprobs,
            orjson.dumps(piece.finish),
            orjson.dumps(piece.stop_reason),
        )

    def logprobs(self, entries: Sequence[TokenLogprobs], text: LogprobText) -> dict[str, Any]:
        return text.chat(entries)

    def whole(self, text: str, last: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": last.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": last.finish,
            "stop_reason": last.stop_reason,
        }


class CompletionShape:
    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> bytes | None:
        return None

    def text(self, piece: Piece, logprobs: bytes) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (
            piece.index,
            orjson.dumps(piece.text),
            logprobs,
        )

    def closing(self, piece: Piece, logprobs: bytes) -> bytes:
        return b'{"index":%d,"text":"","logprobs":%b,"finish_reason":%b,"stop_reason":%b}' % (
            piece.index,
            logprobs,
            orjson.dumps(piece.finish),
            orjson.dumps(piece.stop_reason),
        )

    def logprobs(self, entries: Sequence[TokenLogprobs], text: LogprobText) -> dict[str, Any]:
        return text.completion(entries)

    def whole(self, text: str, last: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": last.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": last.finish,
            "stop_reason": last.stop_reason,
        }


class ChunkFrame:
    """Wraps choices into the server-sent events of one answer."""

    def __init__(self, shape: Shape, *, request_id: str, created: int, model: str) -> None:
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            orjson.dumps(shape.prefix + request_id),
            orjson.dumps(shape.chunk_object),
            created,
            orjson.dumps(model),
        )

    def chunk(self, choice: bytes, usage: bytes | None) -> bytes:
        """``usage``: None leaves the field out, as OpenAI does where it was not asked for."""
        tail = b"]}\n\n" if usage is None else b'],"usage":%b}\n\n' % usage
        return self._head + choice + tail


def error_event(body: bytes) -> bytes:
    """The event that ends a stream which failed; no ``[DONE]`` follows it."""
    return b"data: " + body + b"\n\n"


def running_usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def usage(account: Completion) -> dict[str, Any]:
    """OpenAI's usage, and in ``ekiden`` where every prompt token came from and when.

    ``cached_tokens`` counts what was found in a prefix cache, never what was merely moved.
    """
    sources, times, transfer = account.sources, account.times, account.transfer
    cached = sources.decode_cache + sources.prefill_cache
    return {
        **running_usage(account.prompt_tokens, account.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": cached},
        "ekiden": {
            "sources": {
                "decode_cache": sources.decode_cache,
                "prefill_cache": sources.prefill_cache,
                "prefill_computed": sources.prefill_computed,
                "local_computed": sources.local_computed,
                "reason": sources.reason,
            },
            "times": {
                "queue_s": times.queue_s,
                "prefill_s": times.prefill_s,
                "transfer_s": times.transfer_s,
                "first_decode_s": times.first_decode_s,
                "decode_s": times.decode_s,
            },
            "transfer": {
                "bytes": transfer.bytes,
                "seconds": transfer.seconds,
                "wire": transfer.wire,
                "fetched_tokens": transfer.fetched_tokens,
                "fetched_bytes": transfer.fetched_bytes,
            },
            "fallbacks": [{"kind": f.kind, "reason": f.reason} for f in account.fallbacks],
            "prefill_replica": account.prefill_replica,
            "decode_replica": account.decode_replica,
        },
    }
