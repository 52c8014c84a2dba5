"""The one code path that every output token takes, wherever it was sampled.

For each token, in this order:

1. It is counted. EOS and stop ids count as output tokens; they have no visible text.
2. EOS (unless ``ignore_eos``) ends the choice: ``stop``, no stop reason.
3. An id of ``stop_token_ids`` ends it: ``stop``, the id is the reason. ``ignore_eos`` does not
   shield an id that the caller listed.
4. A stop string that is completed by the token's text ends it: ``stop``, the string is the reason.
5. The last token that ``max_tokens`` or the model's length allows ends it: ``length``. Bytes that
   the detokeniser still held become text then, and may complete a stop string after all.

While no more than ``min_tokens`` tokens have come, 2 to 4 do not apply: EOS and stop ids are banned
from sampling at those positions, and a stop string counts from the token after. Prefill calls this
for the hand-off token and decode calls it again for the same token: the same token in the same
state gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ekiden.core.types import FinishReason, SamplingParams, TokenLogprobs
from ekiden.engine.history import TokenCounts


class StopFound(Protocol):
    """What a text says when a stop string was completed."""

    @property
    def stop(self) -> str: ...


class OutputText(Protocol):
    """The text of one choice, cut at stop strings; ``ekiden.text.output.OutputText`` is one."""

    def push(self, token: int) -> StopFound | None: ...

    def finish(self) -> StopFound | None: ...


TextFactory = Callable[[Sequence[str], int], OutputText]
"""(stop strings, min_tokens) -> the text of a new choice."""


class Advance(msgspec.Struct, frozen=True, kw_only=True):
    """What one token did to its choice."""

    token: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceState:
    """One choice's output so far and the rules that end it."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        eos_token_ids: frozenset[int],
        max_output: int,
        text_factory: TextFactory,
    ) -> None:
        """``max_output`` is ``max_tokens``, or less where the model's length allows no more."""
        self.output: list[int] = []
        self.counts: TokenCounts | None = None
        """Of the output, for penalties; whoever needs them starts them."""
        self.finish: FinishReason | None = None
        self.max_output = max_output
        self.min_tokens = sampling.min_tokens
        self.eos = frozenset() if sampling.ignore_eos else eos_token_ids
        self.stop_ids = frozenset(sampling.stop_token_ids)
        # Most requests have no stop strings, and then no token need become text here.
        stops = sampling.stop
        self.text = text_factory(stops, sampling.min_tokens) if stops else None

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.max_output - len(self.output)

    def banned(self, ahead: int = 0) -> tuple[int, ...]:
        """Tokens that may not be sampled at the next position, or ``ahead`` positions after it."""
        if len(self.output) + ahead >= self.min_tokens:
            return ()
        return tuple(sorted(self.eos | self.stop_ids))


def advance(state: ChoiceState, token: int, logprobs: TokenLogprobs | None = None) -> Advance:
    """Add ``token`` to the choice and decide whether it ends there.

    Raises:
        ValueError: the choice has ended already.
    """
    if state.finish is not None:
        raise ValueError(f"the choice ended ({state.finish}) before token {token}")
    state.output.append(token)
    if state.counts is not None:
        state.counts.add(token)
    state.finish, reason = _verdict(state, token)
    return Advance(token=token, logprobs=logprobs, finish=state.finish, stop_reason=reason)


def _verdict(state: ChoiceState, token: int) -> tuple[FinishReason | None, str | int | None]:
    if len(state.output) > state.min_tokens:
        if token in state.eos:
            return FinishReason.STOP, None
        if token in state.stop_ids:
            return FinishReason.STOP, token
    if state.text is not None and (match := state.text.push(token)):
        return FinishReason.STOP, match.stop
    if len(state.output) >= state.max_output:
        if state.text is not None and (match := state.text.finish()):
            return FinishReason.STOP, match.stop
        return FinishReason.LENGTH, None
    return None, None
