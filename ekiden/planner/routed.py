"""Where the tokens of one step go among the ranks that hold experts.

Shape suffixes: L layers, R ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Routed:
    """What is known of one step, in place of a calibration's ``balance``.

    The layers stand for all that have routed experts.
    """

    def __init__(self, tokens_LR: NDArray[Any], touched_LR: NDArray[Any]) -> None:
        """``tokens_LR`` of each rank; ``touched_LR``: experts of it that have any of these, as a
        share of the experts of the rank that holds most."""
        mean_L1 = tokens_LR.mean(axis=1, keepdims=True)
        self._load_LR = np.divide(
            tokens_LR, mean_L1, out=np.zeros(tokens_LR.shape), where=mean_L1 > 0
        )
        self._touched_LR = touched_LR
        self.busiest = max(1.0, float(self._load_LR.max(axis=1).mean()))
        """Tokens of the busiest rank over those of a mean one, in the mean of the layers."""

    def seconds(self, reading: float, products: float) -> tuple[float, float]:
        """Of the busiest rank in each layer, and of a mean one, in all layers.

        ``reading``: seconds for all experts of a rank. ``products``: of a mean rank's tokens.
        """
        time_LR = np.maximum(reading * self._touched_LR, products * self._load_LR)
        return float(time_LR.max(axis=1).mean()), float(time_LR.mean())
