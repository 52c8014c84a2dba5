"""What a step has to compute, and what its time goes to."""

from __future__ import annotations

import msgspec

from ekiden.planner.routed import Routed


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one DP group of a replica computes in a step; means over many steps may be fractions."""

    decode: float = 0.0
    """Sequences with a token each."""
    context: float = 0.0
    """Tokens that each of these sees."""
    prefill: float = 0.0
    """Tokens of prompts."""
    seen: float = 0.0
    """Tokens that each of these sees, on average."""
    routed: Routed | None = None
    """How its tokens fall on ranks with experts; None: as unevenly as the calibration says."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, by what they go to."""

    weights: float = 0.0
    """Matrix products, or the reading of their weights, whichever takes longer."""
    attention: float = 0.0
    """Scores, or the reading of KV."""
    communication: float = 0.0
    overhead: float = 0.0
    idle: float = 0.0
    """Waiting for another stage: the bubble."""

    @property
    def total(self) -> float:
        return self.weights + self.attention + self.communication + self.overhead + self.idle

    @property
    def communication_share(self) -> float:
        return self.communication / self.total if self.total else 0.0

    def __add__(self, other: Split) -> Split:
        return Split(
            weights=self.weights + other.weights,
            attention=self.attention + other.attention,
            communication=self.communication + other.communication,
            overhead=self.overhead + other.overhead,
            idle=self.idle + other.idle,
        )

    def times(self, factor: float) -> Split:
        if factor == 1:
            return self
        return Split(
            weights=self.weights * factor,
            attention=self.attention * factor,
            communication=self.communication * factor,
            overhead=self.overhead * factor,
            idle=self.idle * factor,
        )
