"""Turns a generation's deltas into an answer: a whole one, or the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from ekiden.core.types import Completion, Delta, SamplingParams, TokenLogprobs
from ekiden.text.tokenizer import Tokenizer
from gateway.openai.choice import ChoiceText, LogprobText, Piece
from gateway.openai.shapes import DONE, ChunkFrame, Shape, running_usage, usage


class Answer:
    """The choices of one request. ``completion_tokens`` counts what has come so far."""

    def __init__(self, shape: Shape, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.shape = shape
        self.wants_logprobs = sampling.logprobs is not None
        count = range(sampling.n)
        self._choices = [ChoiceText(index, tokenizer, sampling) for index in count]
        self._logprobs = [LogprobText(tokenizer) for _ in count]

    def push(self, deltas: Sequence[Delta]) -> list[Piece]:
        return [self._choices[delta.choice].push(delta) for delta in deltas]

    def logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        return self.shape.logprobs(entries, self._logprobs[index])

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices)

    @property
    def size(self) -> int:
        return len(self._choices)


class WholeAnswer:
    """Collects everything; ``render`` once the account has come."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._texts: list[list[str]] = [[] for _ in range(answer.size)]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in range(answer.size)]
        self._last: dict[int, Piece] = {}

    def push(self, deltas: Sequence[Delta]) -> None:
        for piece in self._answer.push(deltas):
            self._texts[piece.index].append(piece.text)
            self._entries[piece.index].extend(piece.logprobs)
            self._last[piece.index] = piece

    def render(self, account: Completion, *, request_id: str, created: int, model: str) -> bytes:
        shape = self._answer.shape
        choices = [
            shape.whole(
                "".join(self._texts[index]),
                piece,
                self._answer.logprobs(index, self._entries[index]),
            )
            for index, piece in sorted(self._last.items())
        ]
        return orjson.dumps(
            {
                "id": shape.prefix + request_id,
                "object": shape.whole_object,
                "created": created,
                "model": model,
                "choices": choices,
                "usage": usage(account),
            }
        )


class StreamedAnswer:
    """Bytes of server-sent events. Every log-probability is sent once, with the next chunk."""

    def __init__(
        self,
        answer: Answer,
        frame: ChunkFrame,
        *,
        prompt_tokens: int,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._answer, self._frame = answer, frame
        self._prompt_tokens = prompt_tokens
        self._include_usage, self._continuous = include_usage, continuous_usage
        self._waiting: list[list[TokenLogprobs]] = [[] for _ in range(answer.size)]

    def opening(self) -> bytes:
        choices = [self._answer.shape.opening(index) for index in range(self._answer.size)]
        return b"".join(self._chunk(choice) for choice in choices if choice is not None)

    def push(self, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas, in one piece, for one send."""
        return b"".join(self._piece(piece) for piece in self._answer.push(deltas))

    def closing(self, account: Completion) -> bytes:
        """Usage if it was asked for, and ``[DONE]``."""
        if not self._include_usage:
            return DONE
        return self._frame.chunk(b"", orjson.dumps(usage(account))) + DONE

    def _piece(self, piece: Piece) -> bytes:
        self._waiting[piece.index].extend(piece.logprobs)
        shape, out = self._answer.shape, b""
        if piece.text:
            out += self._chunk(shape.text(piece, self._take_logprobs(piece.index)))
        if piece.finish is not None:
            out += self._chunk(shape.closing(piece, self._take_logprobs(piece.index)))
        return out

    def _take_logprobs(self, index: int) -> bytes:
        entries = self._waiting[index]
        if not entries:
            return b"null"
        self._waiting[index] = []
        return orjson.dumps(self._answer.logprobs(index, entries))

    def _chunk(self, choice: bytes) -> bytes:
        return self._frame.chunk(choice, self._usage_so_far())

    def _usage_so_far(self) -> bytes | None:
        if self._continuous:
            so_far = running_usage(self._prompt_tokens, self._answer.completion_tokens)
            return orjson.dumps(so_far)
        return b"null" if self._include_usage else None
