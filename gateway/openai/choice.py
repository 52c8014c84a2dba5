"""The text of one choice as the client sees it, and the log-probabilities that go with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from ekiden.core.types import Delta, FinishReason, SamplingParams, TokenLogprobs
from ekiden.text.output import OutputText
from ekiden.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one delta adds to a choice."""

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish: FinishReason | None
    stop_reason: str | int | None


class ChoiceText:
    """Feed deltas in order. Stop strings are cut here by the matcher that the engine uses too."""

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._text = OutputText(tokenizer, sampling.stop, min_tokens=sampling.min_tokens)
        self._matched: str | None = None
        self.tokens = 0

    def push(self, delta: Delta) -> Piece:
        self.tokens += len(delta.tokens)
        kept = self._push_tokens(self._visible(delta))
        if delta.finish is not None:
            kept += self._end(delta)
        return Piece(
            index=self._index,
            text=self._text.take() + kept,
            logprobs=delta.logprobs,
            finish=delta.finish,
            stop_reason=self._matched or delta.stop_reason,
        )

    def _push_tokens(self, tokens: Sequence[int]) -> str:
        """What a match keeps, ``""`` without one. After a match there is no more text."""
        for token in tokens:
            if self._matched is None and (match := self._text.push(token)):
                self._matched = match.stop
                return match.keep
        return ""

    def _end(self, delta: Delta) -> str:
        kept = ""
        if self._matched is None and (match := self._text.finish()):
            self._matched, kept = match.stop, match.keep
        if isinstance(delta.stop_reason, str) and self._matched != delta.stop_reason:
            log.error(
                "%s choice %d: the engine stopped at %r, the gateway at %r",
                delta.request_id,
                self._index,
                delta.stop_reason,
                self._matched,
            )
        return kept

    def _visible(self, delta: Delta) -> Sequence[int]:
        """The tokens without the EOS or stop id that ended the choice: it has no text."""
        by_token = delta.finish is FinishReason.STOP and not isinstance(delta.stop_reason, str)
        if by_token and delta.tokens:
            last = delta.tokens[-1]
            if last == delta.stop_reason or last in self._tokenizer.eos_ids:
                return delta.tokens[:-1]
        return delta.tokens


class LogprobText:
    """Log-probabilities in the shape of each endpoint. One per choice: it counts characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """``{"content": [{token, logprob, bytes, top_logprobs}]}``, one entry a token."""
        content = [
            {
                **self._entry(entry.token, entry.logprob),
                "top_logprobs": [self._entry(*top) for top in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """``{tokens, token_logprobs, top_logprobs, text_offset}``, parallel lists."""
        texts = [self._text(entry.token) for entry in entries]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {self._text(token): _finite(value) for token, value in reversed(entry.top)}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
