"""The random draw: a race between tokens that rounding hardly ever changes.

Every token runs with log p and a Gumbel number of (seed, position, token) on top; the highest
wins, which draws from p (the Gumbel-max trick). Computed in other chunks, batches or splits, logits
differ in their last bits; that changes the winner only where the first two are as close as that.
One number through the inverse CDF is far more sensitive: a shift anywhere in the sum moves every
boundary after it (measured: one token in 600 of English text at temperature 1, and here none).

So that few numbers are needed the race has two heats: blocks of ids, each with its whole mass, then
the ids of the block that won. The best of a block runs like its mass, so the odds are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ekiden.core.ids import mix64

BLOCK = 256
"""Ids of one block."""

_BLOCKS, _IDS = 0, 1
"""The heats, for which numbers differ."""


def race(weights_V: NDArray[np.float64], seed: int, position: int) -> int:
    """The index that output ``position`` of a choice with ``seed`` draws; weight 0 never wins.

    ``weights_V`` need not add up to 1; one at least is more than 0.
    """
    padding = -len(weights_V) % BLOCK
    blocks_BI = np.pad(weights_V, (0, padding)).reshape(-1, BLOCK)
    block = _winner(blocks_BI.sum(axis=1), 0, mix64(seed, position, _BLOCKS))
    return _winner(blocks_BI[block], block * BLOCK, mix64(seed, position, _IDS))


def _winner(weights: NDArray[np.float64], first: int, key: int) -> int:
    """``first`` plus the place of the winner; the lowest among equals."""
    numbers = np.arange(first, first + len(weights), dtype=np.uint64)
    with np.errstate(divide="ignore"):  # log 0 is minus infinity, which never wins
        return first + int(np.argmax(np.log(weights) + gumbel(key, numbers)))


def gumbel(key: int, numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One Gumbel(0, 1) number for each of ``numbers``, always the same under the same ``key``."""
    bits = _splitmix64(numbers ^ np.uint64(key)) >> np.uint64(12)
    # Halves keep it off 0 and 1, where a logarithm ends.
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)))


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``ekiden.core.ids.mix64``'s step, for a whole array; overflow wraps."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
