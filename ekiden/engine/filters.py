"""Top-k, top-p and min-p over the heads of many rows at once.

Each keeps a prefix of the row's tokens, the most likely first; a later one counts within what the
earlier ones kept. Shape legend: S rows, K tokens of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ekiden.engine.plan import SampleSpec

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Filters(NamedTuple):
    """One number a row; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep everything."""

    top_k_S: Ints
    top_p_S: Doubles
    min_p_S: Doubles

    @classmethod
    def of(cls, specs: Sequence[SampleSpec]) -> Filters:
        return cls(
            np.array([min(spec.top_k, 1 << 62) for spec in specs], np.int64),
            np.array([spec.top_p for spec in specs], np.float64),
            np.array([spec.min_p for spec in specs], np.float64),
        )

    @property
    def any_S(self) -> Bools:
        """Whether anything is filtered."""
        return (self.top_k_S > 0) | (self.top_p_S < 1.0) | (self.min_p_S > 0.0)

    def pick(self, rows: Ints) -> Filters:
        return Filters(self.top_k_S[rows], self.top_p_S[rows], self.min_p_S[rows])

    def count_kept(self, probs_SK: Doubles, *, whole: bool) -> tuple[Ints, Bools]:
        """How many of ``probs_SK`` (descending) are kept, and whether that is known.

        It is not where more of the row is needed; ``whole`` says that there is no more.
        """
        rows, length = np.arange(len(probs_SK)), probs_SK.shape[1]
        sums_SK = np.cumsum(probs_SK, axis=1)
        by_k = self.top_k_S > 0
        size_S = np.where(by_k, np.minimum(self.top_k_S, length), length)
        ended_S = by_k & (self.top_k_S <= length) | whole
        known_S = ended_S | ~by_k
        total_S = np.where(by_k, sums_SK[rows, size_S - 1], 1.0)

        by_p = self.top_p_S < 1.0
        known_S &= ended_S | ~by_p | (sums_SK[:, -1] >= self.top_p_S)
        # A token stays while the mass before it is short of top_p.
        before_S = np.count_nonzero(sums_SK < (self.top_p_S * total_S)[:, None], axis=1)
        size_S = np.where(by_p, np.minimum(before_S, size_S - 1) + 1, size_S)
        ended_S |= by_p

        by_min = self.min_p_S > 0.0
        likely_SK = probs_SK >= (self.min_p_S * probs_SK[:, 0])[:, None]
        likely_SK &= np.arange(length) < size_S[:, None]
        kept_S = np.where(by_min, np.maximum(1, np.count_nonzero(likely_SK, axis=1)), size_S)
        known_S &= ended_S | ~by_min | (kept_S < size_S)
        return kept_S, known_S
