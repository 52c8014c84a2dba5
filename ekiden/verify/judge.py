"""Is what a pair gave the truth? Tokens, logprobs and bytes, whichever way they were had."""

from __future__ import annotations

from collections.abc import Mapping

from ekiden.cache.layout import KvLayout

from .compare import (
    Bits,
    Bound,
    KvDifference,
    Reference,
    first_difference,
    first_kv_difference,
    logprob_distances,
)
from .outcome import CellFailed, Outcome
from .reference import Record
from .rule import converted


def check_kv(
    name: str,
    source: tuple[KvLayout, Bits],
    target: tuple[KvLayout, Mapping[int, Bits]],
    tokens: int,
    outcome: Outcome,
) -> None:
    """Positions [0, tokens) of decode's ranks must be what prefill had, converted by the rule.

    ``source`` is the whole cache, ``[num_layers, num_kv_heads, tokens, 2, row]``.

    Raises:
        CellFailed: the first layer, head and position that differ.
    """
    (prefill, bits), (decode, ranks) = source, target
    wanted = converted(bits[:, :, :tokens], prefill.dtype, decode.dtype)
    difference = first_kv_difference(wanted, decode, ranks, tokens)
    if difference is not None:
        raise CellFailed("differs", _describe(name, difference))
    outcome.kv_tokens_compared += tokens


def _describe(name: str, difference: KvDifference) -> str:
    return (
        f"prompt {name}: the KV differs first at layer {difference.layer}, head "
        f"{difference.head}, position {difference.position} ({difference.part}, decode rank "
        f"{difference.rank})"
    )


class Verdict:
    """One prompt's answer against the truth, in as many attempts as it has ties."""

    def __init__(
        self, name: str, reference: Reference, bound: Bound, outcome: Outcome, *, same_kv: bool
    ) -> None:
        """``same_kv``: whether prefill and decode keep KV in the same dtype. If not, the truth
        cannot be followed behind a tie: what decode's own tokens left in its cache was not
        converted, what prefill would send of them is."""
        self.start = 0
        """Output position that the next attempt begins at, with the truth's tokens before it."""
        self._about = f"prompt {name} ({len(reference.prompt)} tokens)"
        self._reference = reference
        self._bound = bound
        self._outcome = outcome
        self._same_kv = same_kv
        self._apart = 0.0
        outcome.bound = bound.logprob

    def take(self, record: Record) -> bool:
        """Judge one attempt; whether another is to be made, from ``start``.

        Raises:
            CellFailed: a token differs and is no tie, or the logprobs are out of bounds.
        """
        reference, start, total = self._reference, self.start, len(self._reference.tokens)
        difference = first_difference(reference, record.tokens, start, self._bound.tie)
        end = total if difference is None else difference.position
        self._outcome.equal_tokens += end - start
        self._outcome.tokens += end - start + (difference is not None)
        self._measure(record, end + 1 - start)
        if difference is None:
            return False
        if not difference.tie:
            raise CellFailed(
                "differs",
                f"{self._about}, output position {difference.position}: {difference.got} instead "
                f"of {difference.expected}; its KV that was compared is equal to the bit",
            )
        self._outcome.ties += 1
        self.start = difference.position + 1
        return self._same_kv and self.start < total

    def _measure(self, record: Record, positions: int) -> None:
        """On average over the whole answer: noise averages out, a wrong block does not."""
        distances = logprob_distances(self._reference, record.tops[:positions], self.start)
        self._apart += sum(distances) / sum(map(len, self._reference.tops))
        self._outcome.logprob = max(self._outcome.logprob, self._apart)
        if self._apart > self._bound.logprob:
            raise CellFailed(
                "differs",
                f"{self._about}: its logprobs are {self._apart:.2g} from the truth on average, "
                f"more than {self._bound.logprob:.2g}; its KV that was compared is equal to the "
                "bit",
            )
