"""The slow sampler that the fast one must equal to the bit: one row, one spec, the plain way."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from ekiden.core.ids import mix64
from ekiden.engine.plan import SampleSpec

BLOCK = 256
BOUND = 1e30


def seen_of(spec: SampleSpec) -> Counter[int]:
    """How often each penalised token is in the output; 0: in the prompt only."""
    ids = np.frombuffer(spec.seen, np.uint32).tolist()
    counts = np.frombuffer(spec.seen_counts, np.uint32).tolist()
    return Counter(dict(zip(ids, counts, strict=True)))


def slow_sample(logits_V: torch.Tensor, spec: SampleSpec) -> int:
    """The token of one spec from float32 logits [V]."""
    adjusted_V = slow_adjusted(logits_V, spec)
    if spec.temperature < 1e-5:
        return int(torch.max(adjusted_V, dim=-1).indices)
    shifted_V = adjusted_V - adjusted_V.amax()
    temperature = torch.tensor(min(spec.temperature, BOUND), dtype=torch.float32)
    probs = torch.softmax(shifted_V[None] / temperature, dim=-1)[0].double().numpy()
    order = torch.sort(adjusted_V, descending=True, stable=True).indices.numpy()
    weights_V = np.zeros(len(probs))
    kept = order[: count_kept(probs[order], spec)]
    weights_V[kept] = probs[kept]
    return slow_race(weights_V, spec.seed, spec.position)


def slow_adjusted(logits_V: torch.Tensor, spec: SampleSpec) -> torch.Tensor:
    """Penalties, bias and bans."""
    logits_V = logits_V.clone()
    counts = seen_of(spec)
    if spec.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(counts), dtype=torch.int64)
        values = logits_V[seen]
        factor = min(max(spec.repetition_penalty, 1 / BOUND), BOUND)
        logits_V[seen] = torch.where(values > 0, values / factor, values * factor)
    if spec.frequency_penalty or spec.presence_penalty:
        for token, count in counts.items():
            if count:
                logits_V[token] -= _bounded(spec.frequency_penalty * count + spec.presence_penalty)
    for token, bias in spec.logit_bias.items():
        logits_V[token] += _bounded(bias)
    for token in spec.banned:
        logits_V[token] = -torch.inf
    return logits_V


def _bounded(value: float) -> torch.Tensor:
    return torch.tensor(min(max(value, -BOUND), BOUND), dtype=torch.float32)


def count_kept(probs: NDArray[np.float64], spec: SampleSpec) -> int:
    """How many of ``probs`` (all of the row's, descending) the filters keep."""
    sums = np.cumsum(probs)
    size, total = len(probs), 1.0
    if spec.top_k > 0:
        size = min(spec.top_k, size)
        total = float(sums[size - 1])
    if spec.top_p < 1.0:
        size = int(np.count_nonzero(sums[: size - 1] < spec.top_p * total)) + 1
    if spec.min_p > 0.0:
        size = max(1, int(np.count_nonzero(probs[:size] >= spec.min_p * probs[0])))
    return size


def slow_race(weights_V: NDArray[np.float64], seed: int, position: int) -> int:
    """The two heats, each a plain Gumbel-max over numpy sums of 256 ids."""
    blocks_BI = np.pad(weights_V, (0, -len(weights_V) % BLOCK)).reshape(-1, BLOCK)
    block = _winner(blocks_BI.sum(axis=1), 0, mix64(seed, position, 0))
    return _winner(blocks_BI[block], block * BLOCK, mix64(seed, position, 1))


def _winner(weights: NDArray[np.float64], first: int, key: int) -> int:
    best, winner = -math.inf, -1
    with np.errstate(divide="ignore"):
        logs = np.log(weights)
    for i, log in enumerate(logs.tolist()):
        if log > -math.inf and (score := log + _gumbel(key, first + i)) > best:
            best, winner = score, first + i
    return winner


def _gumbel(key: int, number: int) -> float:
    # What mix64 does to its last value, given the state of those before.
    bits = mix64(number ^ key) >> 12
    uniform = np.array([(bits + 0.5) * 2.0**-52])
    return float((-np.log(-np.log(uniform)))[0])
