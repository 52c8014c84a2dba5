"""What penalties need to know of a choice: its distinct tokens, and how often each has come out."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from ekiden.core.types import SamplingParams
from ekiden.engine.plan import SampleSpec

ITEM = "I"
"""Type code of the arrays: 32 bits, in this machine's order; they never leave it."""


def penalises(sampling: SamplingParams | SampleSpec) -> bool:
    """Whether tokens that came before are chosen less, or more."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


class TokenCounts:
    """Grows with a choice, so that no step counts its tokens again."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        """``prompt`` is empty where only what came out is penalised."""
        self._places: dict[int, int] = {}
        self._ids = array(ITEM)
        self._counts = array(ITEM)
        for token in prompt:
            self._place(token)
        for token in output:
            self.add(token)

    def _place(self, token: int) -> int:
        if (place := self._places.get(token)) is None:
            place = self._places[token] = len(self._ids)
            self._ids.append(token)
            self._counts.append(0)
        return place

    def add(self, token: int) -> None:
        """``token`` came out."""
        self._counts[self._place(token)] += 1

    def snapshot(self, ahead: Iterable[int] = ()) -> tuple[bytes, bytes]:
        """Distinct tokens, and how often each came out (0: in the prompt only), as u32.

        As if ``ahead`` had come out as well.
        """
        if not ahead:
            return self._ids.tobytes(), self._counts.tobytes()
        ids, counts, new = self._ids[:], self._counts[:], dict[int, int]()
        for token in ahead:
            place = self._places.get(token, new.get(token))
            if place is None:
                place = new[token] = len(ids)
                ids.append(token)
                counts.append(0)
            counts[place] += 1
        return ids.tobytes(), counts.tobytes()


def followed(spec: SampleSpec, token: int) -> SampleSpec:
    """``spec`` as it is once ``token``, unknown when it was made, has come out before it."""
    if not penalises(spec):
        return spec
    ids, counts = array(ITEM, spec.seen), array(ITEM, spec.seen_counts)
    try:
        counts[ids.index(token)] += 1
    except ValueError:
        ids.append(token)
        counts.append(1)
    return msgspec.structs.replace(spec, seen=ids.tobytes(), seen_counts=counts.tobytes())
