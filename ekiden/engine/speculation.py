"""Speculation without a second model: propose what followed the last tokens before.

Prompt lookup (arXiv:2304.04487 verifies against copied spans; vLLM's ``ngram`` method): where the
last n tokens of prompt + output stood before, the tokens that followed there are proposed. The
model scores them all in one step. A proposal is taken only if it is the token that the sampler
chooses at its position, so the output is what it would be without.

The index is a chain of earlier places by hash, as LZ77 coders have: a few bytes a token, a lookup
walks a bounded part of it, and every place is compared token by token, so a collision only costs
time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ekiden.core.config import SpeculativeConfig

MAX_PROBES = 16
"""Earlier places of a lookup that are compared, the latest first."""

_NONE = -1
_MULTIPLIER = 0x9E3779B1
_MASK = (1 << 32) - 1


class PromptLookup:
    """The earlier places of one sequence's n-grams. Tokens are only ever added to a sequence."""

    def __init__(self, config: SpeculativeConfig, max_tokens: int) -> None:
        """``max_tokens`` is the length that the sequence never passes; 8 bytes each are held."""
        self._shortest = config.shortest_lookup
        self._longest = config.prompt_lookup_max
        bits = max(4, (max_tokens - 1).bit_length())
        self._shift = 32 - min(bits, 32)
        self._latest = array("i", [_NONE]) * (1 << bits)
        """Last position of the last n-gram with this hash."""
        self._before = array("i")
        """The position before that with the same hash, by position."""

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most ``limit`` tokens that may follow ``tokens``; none if the end is new.

        ``tokens`` begin with those of the call before. The longest match wins, the latest among
        equals. A match that reaches into its own continuation is copied on and on, as in LZ77.
        """
        self._index(tokens)
        match = self._match(tokens) if limit > 0 else _NONE
        if match == _NONE:
            return ()
        known = len(tokens)
        proposed: list[int] = []
        for source in range(match + 1, match + 1 + limit):
            proposed.append(tokens[source] if source < known else proposed[source - known])
        return tuple(proposed)

    def _index(self, tokens: Sequence[int]) -> None:
        latest, before = self._latest, self._before
        for end in range(len(before), len(tokens)):
            if end + 1 < self._shortest:
                before.append(_NONE)
                continue
            place = self._hash(tokens, end)
            before.append(latest[place])
            latest[place] = end

    def _hash(self, tokens: Sequence[int], end: int) -> int:
        value = 0
        for token in tokens[end + 1 - self._shortest : end + 1]:
            value = ((value ^ token) * _MULTIPLIER) & _MASK
        return value >> self._shift

    def _match(self, tokens: Sequence[int]) -> int:
        """The end of the best earlier place of the last n tokens, -1 if there is none."""
        last = len(tokens) - 1
        place = self._before[last] if last >= 0 else _NONE
        best, length, probes = _NONE, self._shortest - 1, 0
        while place != _NONE and length < self._longest and probes < MAX_PROBES:
            if (common := self._common(tokens, place, last)) > length:
                best, length = place, common
            place, probes = self._before[place], probes + 1
        return best

    def _common(self, tokens: Sequence[int], place: int, last: int) -> int:
        """How many tokens up to ``place`` and up to ``last`` are equal, at most the longest."""
        count = 0
        while (
            count < self._longest
            and count <= place
            and tokens[place - count] == tokens[last - count]
        ):
            count += 1
        return count
