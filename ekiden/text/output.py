"""The visible text of one choice: detokenised, cut at stop strings. Engine and gateway share it."""

from __future__ import annotations

from collections.abc import Sequence

from ekiden.text.detokenize import IncrementalDetokenizer
from ekiden.text.stop import StopMatch, StopMatcher
from ekiden.text.tokenizer import Tokenizer


class OutputText:
    """Feed tokens in order; a stop string counts once more than ``min_tokens`` have come."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._count = 0

    def push(self, token: int) -> StopMatch | None:
        """Add a token. A match ends the choice: what it keeps is the last of its text."""
        self._count += 1
        return self._matcher.push(self._detokenizer.push(token), armed=self._armed)

    def take(self) -> str:
        """The text that is certain and has not been taken yet."""
        return self._matcher.take()

    def finish(self) -> StopMatch | None:
        """No token will come. Held bytes become text, which may still complete a stop string.

        Without a match, ``take`` then gives all that is left.
        """
        match = self._matcher.push(self._detokenizer.flush(), armed=self._armed)
        if match is None:
            self._matcher.release()
        return match

    @property
    def _armed(self) -> bool:
        return self._count > self._min_tokens
