"""Greedy choice and the Gumbel race of ``ekiden.engine.draw``, without leaving the device.

The numbers of the race are those of ``draw.gumbel``, bit for bit in their integer part; logarithms
and sums are float64, so that the choice is the reference's except where two tokens lie within a
few units of the last place of a double.

Shapes: R rows, V vocabulary, G blocks of 256 ids.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256
"""Ids of one block: as ``ekiden.engine.draw.BLOCK``, or the draws differ."""

_BLOCK = tl.constexpr(BLOCK)
_GREEDY_WIDTH = 4096


def greedy(logits_RV: Tensor) -> Tensor:
    """The largest logit's id of every row, [R] int64; the lowest id among equals."""
    rows, vocab = logits_RV.shape
    pieces = triton.cdiv(vocab, _GREEDY_WIDTH)
    best_RG = torch.empty((rows, pieces), dtype=torch.float32, device=logits_RV.device)
    ids_RG = torch.empty((rows, pieces), dtype=torch.int64, device=logits_RV.device)
    _greedy_pieces[(rows, pieces)](
        logits_RV, best_RG, ids_RG, logits_RV.stride(0), vocab, WIDTH=_GREEDY_WIDTH, num_warps=8
    )
    out_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    _greedy_join[(rows,)](best_RG, ids_RG, out_R, pieces, WIDTH=triton.next_power_of_2(pieces))
    return out_R


def draw(weights_RV: Tensor, block_keys_R: Tensor, id_keys_R: Tensor) -> Tensor:
    """What ``race_all`` draws from every row of ``weights_RV``, [R] int64.

    ``weights_RV`` is float32 or float64, not negative, one at least above 0 in each row; a weight
    of 0 never wins. The keys are those of both heats, as ``key_bits`` gives them.
    """
    rows, vocab = weights_RV.shape
    pieces = triton.cdiv(vocab, BLOCK)
    scores_RG = torch.empty((rows, pieces), dtype=torch.float64, device=weights_RV.device)
    _race_blocks[(rows, pieces)](
        weights_RV, block_keys_R, scores_RG, weights_RV.stride(0), vocab, num_warps=2
    )
    out_R = torch.empty(rows, dtype=torch.int64, device=weights_RV.device)
    _race_ids[(rows,)](
        weights_RV, id_keys_R, scores_RG, out_R, weights_RV.stride(0), vocab, pieces,
        WIDTH=triton.next_power_of_2(pieces), num_warps=4,
    )  # fmt: skip
    return out_R


def key_bits(keys_R: NDArray[np.uint64]) -> Tensor:
    """Keys as the kernels take them: the same 64 bits as int64, on the CPU."""
    return torch.from_numpy(keys_R.view(np.int64))


@triton.jit
def _greedy_pieces(logits_ptr, best_ptr, ids_ptr, logits_row, vocab, WIDTH: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = piece * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(logits_ptr + row * logits_row + ids, mask=ids < vocab, other=float("-inf"))
    best, place = tl.max(
        values.to(tl.float32), axis=0, return_indices=True, return_indices_tie_break_left=True
    )
    slot = row * tl.num_programs(1) + piece
    tl.store(best_ptr + slot, best)
    tl.store(ids_ptr + slot, (piece * WIDTH + place).to(tl.int64))


@triton.jit
def _greedy_join(best_ptr, ids_ptr, out_ptr, pieces, WIDTH: tl.constexpr):
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    best = tl.load(best_ptr + row * pieces + places, mask=places < pieces, other=float("-inf"))
    _, place = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(ids_ptr + row * pieces + place))


@triton.jit
def _race_blocks(weights_ptr, keys_ptr, scores_ptr, weights_row, vocab):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = piece * _BLOCK + tl.arange(0, _BLOCK)
    weights = tl.load(weights_ptr + row * weights_row + ids, mask=ids < vocab, other=0.0)
    key = tl.load(keys_ptr + row).to(tl.uint64, bitcast=True)
    mass = tl.sum(weights.to(tl.float64), axis=0)
    score = _log(mass) + _gumbel(key, piece.to(tl.int64).to(tl.uint64))
    tl.store(scores_ptr + row * tl.num_programs(1) + piece, score)


@triton.jit
def _race_ids(
    weights_ptr, keys_ptr, scores_ptr, out_ptr, weights_row, vocab, pieces, WIDTH: tl.constexpr,
):  # fmt: skip
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    scores = tl.load(scores_ptr + row * pieces + places, mask=places < pieces, other=float("-inf"))
    _, piece = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    ids = piece * _BLOCK + tl.arange(0, _BLOCK)
    weights = tl.load(weights_ptr + row * weights_row + ids, mask=ids < vocab, other=0.0)
    key = tl.load(keys_ptr + row).to(tl.uint64, bitcast=True)
    runs = _log(weights.to(tl.float64)) + _gumbel(key, ids.to(tl.int64).to(tl.uint64))
    _, place = tl.max(runs, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, (piece * _BLOCK + place).to(tl.int64))


@triton.jit
def _splitmix64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, numbers):
    bits = (_splitmix64(numbers ^ key) >> 12).to(tl.int64)
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    return -tl.log(-tl.log(uniform))


@triton.jit
def _log(x):
    """log x in float64; minus infinity for 0, which never wins."""
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), float("-inf"))
