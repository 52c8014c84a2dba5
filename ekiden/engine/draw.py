"""The random draw: a race between tokens that rounding hardly ever changes.

Every token runs with log p and a Gumbel number of (seed, position, token) on top; the highest
wins, which draws from p (the Gumbel-max trick). Computed in other chunks, batches or splits, logits
differ in their last bits; that changes the winner only where the first two are as close as that.
One number through the inverse CDF is far more sensitive: a shift anywhere in the sum moves every
boundary after it (measured: one token in 600 of English text at temperature 1, and here none).

So that few numbers are needed the race has two heats: blocks of ids, each with its whole mass, then
the ids of the block that won. The best of a block runs like its mass, so the odds are the same.

All rows of a batch race at once; each comes out as it would alone.

Shape legend: S rows, V vocabulary, B blocks, I ids of a block, K kept tokens of a row, U blocks of
all rows that hold a kept token.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 256
"""Ids of one block."""

_BLOCKS, _IDS = 0, 1
"""The heats, for which numbers differ."""

_MASK = (1 << 64) - 1
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]


class Keys(NamedTuple):
    """One number a row for each heat: ``mix64(seed, position, heat)``."""

    blocks_S: Bits
    ids_S: Bits

    @classmethod
    def of(cls, seeds: Sequence[int], positions: Sequence[int]) -> Keys:
        rows_S = _splitmix64(_bits(seeds))
        rows_S = _splitmix64(rows_S ^ _bits(positions))
        return cls(_splitmix64(rows_S ^ np.uint64(_BLOCKS)), _splitmix64(rows_S ^ np.uint64(_IDS)))

    def pick(self, rows: Ints) -> Keys:
        return Keys(self.blocks_S[rows], self.ids_S[rows])


def race(weights_V: Doubles, seed: int, position: int) -> int:
    """The index that output ``position`` of a choice with ``seed`` draws; weight 0 never wins.

    ``weights_V`` need not add up to 1; one at least is more than 0.
    """
    padding = -len(weights_V) % BLOCK
    blocks_BI = np.pad(weights_V, (0, padding)).reshape(-1, BLOCK)
    keys = Keys.of([seed], [position])
    block = int(_scores(blocks_BI.sum(axis=1), keys.blocks_S, np.arange(len(blocks_BI))).argmax())
    numbers = np.arange(block * BLOCK, (block + 1) * BLOCK)
    return int(numbers[_scores(blocks_BI[block], keys.ids_S, numbers).argmax()])


def race_all(probs_SV: torch.Tensor, keys: Keys) -> Ints:
    """``race`` for every row of ``probs_SV`` (float32)."""
    if probs_SV.is_cuda and find_spec("triton"):
        return race_on_device(probs_SV, keys)
    masses_SB = masses(probs_SV)
    numbers_B = np.arange(masses_SB.shape[1])
    blocks_S = _scores(masses_SB, keys.blocks_S[:, None], numbers_B).argmax(axis=1)
    ids_SI = blocks_S[:, None] * BLOCK + np.arange(BLOCK)
    size = probs_SV.shape[1]
    places = torch.from_numpy(np.minimum(ids_SI, size - 1)).to(probs_SV.device)
    weights_SI = probs_SV.gather(1, places).cpu().double().numpy() * (ids_SI < size)
    best_S = _scores(weights_SI, keys.ids_S[:, None], ids_SI).argmax(axis=1)
    return np.asarray(blocks_S * BLOCK + best_S)


def race_on_device(probs_SV: torch.Tensor, keys: Keys) -> Ints:
    """``race_all`` by the Triton kernels: one copy of S numbers back instead of a copy a heat."""
    from ekiden.layers.backends.triton.draw import draw, key_bits

    both_2S = torch.stack((key_bits(keys.blocks_S), key_bits(keys.ids_S))).to(probs_SV.device)
    return np.asarray(draw(probs_SV, both_2S[0], both_2S[1]).cpu().numpy())


def race_kept(ids_SK: Ints, weights_SK: Doubles, kept_S: Ints, size: int, keys: Keys) -> Ints:
    """``race`` for every row, where only the first ``kept_S`` of ``ids_SK`` have a weight.

    Each of the ``size`` ids occurs at most once in a row.
    """
    rows, columns = np.nonzero(np.arange(ids_SK.shape[1]) < kept_S[:, None])
    ids, blocks = ids_SK[rows, columns], -(-size // BLOCK)
    touched_U, which = np.unique(rows * blocks + ids // BLOCK, return_inverse=True)
    weights_UI = np.zeros((len(touched_U), BLOCK))
    weights_UI[which, ids % BLOCK] = weights_SK[rows, columns]
    owner_U, block_U = np.divmod(touched_U, blocks)
    scores_U = _scores(weights_UI.sum(axis=1), keys.blocks_S[owner_U], block_U)
    winner_S = _first_best(scores_U, owner_U, len(ids_SK))
    numbers_SI = block_U[winner_S, None] * BLOCK + np.arange(BLOCK)
    best_S = _scores(weights_UI[winner_S], keys.ids_S[:, None], numbers_SI).argmax(axis=1)
    return np.asarray(block_U[winner_S] * BLOCK + best_S)


def _first_best(scores_U: Doubles, owner_U: Ints, rows: int) -> Ints:
    """Where each row's best score is first; ``owner_U`` ascends and names every row."""
    best_S = np.maximum.reduceat(scores_U, np.searchsorted(owner_U, np.arange(rows)))
    hits = np.nonzero(scores_U == best_S[owner_U])[0]
    return np.asarray(hits[np.searchsorted(owner_U[hits], np.arange(rows))])


def masses(probs_SV: torch.Tensor) -> Doubles:
    """What each block of each row adds up to, in double."""
    rows, size = probs_SV.shape
    whole = size // BLOCK * BLOCK
    if probs_SV.device.type != "cpu":
        return masses_on_device(probs_SV)
    blocks_SBI = probs_SV[:, :whole].view(rows, -1, BLOCK).numpy()
    masses_SB = np.add.reduce(blocks_SBI, axis=-1, dtype=np.float64)
    if whole == size:
        return np.asarray(masses_SB)
    last_SI = np.zeros((rows, BLOCK))
    last_SI[:, : size - whole] = probs_SV[:, whole:].numpy()
    return np.concatenate((masses_SB, last_SI.sum(axis=1, keepdims=True)), axis=1)


def masses_on_device(probs_SV: torch.Tensor) -> Doubles:
    """``masses`` by torch, which adds up in another order."""
    padded = torch.nn.functional.pad(probs_SV, (0, -probs_SV.shape[1] % BLOCK))
    sums_SB = padded.view(len(padded), -1, BLOCK).sum(-1, dtype=torch.float64)
    return np.asarray(sums_SB.cpu().numpy())


def _scores(weights: Doubles, keys: Bits, numbers: Ints) -> Doubles:
    with np.errstate(divide="ignore"):  # log 0 is minus infinity, which never wins
        return np.asarray(np.log(weights) + gumbel(keys, numbers.astype(np.uint64)))


def gumbel(keys: Bits | int, numbers: Bits) -> Doubles:
    """One Gumbel(0, 1) number for each of ``numbers``, always the same under the same key."""
    bits = _splitmix64(numbers ^ np.asarray(keys, np.uint64)) >> np.uint64(12)
    # Halves keep it off 0 and 1, where a logarithm ends.
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)))


def _bits(values: Sequence[int]) -> Bits:
    return np.array([value & _MASK for value in values], np.uint64)


def _splitmix64(x: Bits) -> Bits:
    """``ekiden.core.ids.mix64``'s step, for a whole array; overflow wraps."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
