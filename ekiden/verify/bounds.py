"""How far from the truth a right answer may be, measured without any hand-off.

In float32 ties apart tokens are equal. With KV or activations of fewer bits, replicas that split
the model otherwise add in another order and may round a row otherwise. How much that moves logprobs
depends on the model, so it is measured: the same prompts, in one process, on one rank and on more.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ekiden.core.errors import SetupError

from .compare import TIE, Bound, Reference, first_difference, logprob_distances
from .layouts import Layout
from .truth import Truths

SPLITS = (2, 3)
"""TP of the replicas that are compared with one rank."""
MARGIN = 2.0
"""A grid has more pairs than were measured, and the worst of many is worse."""
FLOORS = {"float32": 1e-5, "bfloat16": 2e-3, "float16": 2e-3, "int8": 2e-3, "fp8_e4m3": 2e-3}
"""By KV dtype, on average over an answer: one row rounded otherwise is rare, and may not have been
seen. A wrong block of the tiny model is 0.05."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """By how much logprobs differ between splits of one process."""

    average: float
    """Over the answer where it is largest."""
    largest: float


class Bounds:
    """The bound for each two KV dtypes, measured when it is first asked for."""

    def __init__(self, truths: Truths) -> None:
        self._truths = truths
        self._noise: dict[str, Noise] = {}

    def of(self, prefill: str, decode: str) -> Bound:
        """For a hand-off from KV of the one dtype to KV of the other."""
        kinds = list(dict.fromkeys((prefill, decode)))
        noises, floor = [self._of(kind) for kind in kinds], max(FLOORS[kind] for kind in kinds)
        average = MARGIN * sum(noise.average for noise in noises)
        # Each of the two best logits may move.
        swap = 2 * max(floor, MARGIN * sum(noise.largest for noise in noises))
        tie = TIE if kinds == ["float32"] else swap
        return Bound(logprob=max(floor, average), tie=tie)

    def _of(self, kind: str) -> Noise:
        if kind not in self._noise:
            truth = list(self._truths.of(kind, kind).values())
            distances = [d for tp in SPLITS for d in self._distances(kind, tp, truth)]
            self._noise[kind] = Noise(
                average=max((sum(d) / len(d) for d in distances), default=0.0),
                largest=max((max(d) for d in distances), default=0.0),
            )
        return self._noise[kind]

    def _distances(self, kind: str, tp: int, truth: Sequence[Reference]) -> list[list[float]]:
        """Of each prompt; those whose answers part before half are left out."""
        try:
            split = self._truths.alone(Layout(tp=tp, kv=kind))
        except SetupError:  # a model of few heads; then there is nothing to compare it with either
            return []
        found = []
        for mine, theirs in zip(truth, split, strict=True):
            difference = first_difference(mine, theirs.tokens)
            same = len(mine.tokens) if difference is None else difference.position
            if 2 * same >= len(mine.tokens):
                found.append(logprob_distances(mine, theirs.tops[: same + 1]))
        return found
