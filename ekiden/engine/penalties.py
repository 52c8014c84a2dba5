"""What is done to logits before anything is chosen, for all rows at once.

In this order, as vLLM does: repetition penalty, frequency and presence penalty, ``logit_bias``,
banned tokens. Every (row, token) is written once by each, so one indexed write does for a batch.

Shape legend: R rows of logits, S specs (several may share a row), V vocabulary, N touched logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ekiden.core.errors import InvariantBroken
from ekiden.engine.plan import SampleSpec

BOUND = 1e30
"""Parameters are doubles and logits are not: beyond this they would turn into inf and NaN."""

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]


class _Entries(NamedTuple):
    """(place in the specs, token) of N logits, and a number for each."""

    place_N: Ints
    token_N: Ints
    number_N: Doubles


def adjusted(
    logits_RV: torch.Tensor, specs: Sequence[SampleSpec], rows: Sequence[int]
) -> torch.Tensor:
    """Logits [S, V] after penalties, bias and bans; ``logits_RV`` itself is never written.

    Raises:
        InvariantBroken: a spec names a token outside the vocabulary.
    """
    if not any(map(_adjusts, specs)):
        if list(rows) == list(range(len(logits_RV))):
            return logits_RV
        return logits_RV.index_select(0, torch.tensor(rows, device=logits_RV.device))
    adjusted_SV = logits_RV.index_select(0, torch.tensor(rows, device=logits_RV.device))
    _penalise(adjusted_SV, specs)
    biased = _listed([(i, spec.logit_bias) for i, spec in enumerate(specs) if spec.logit_bias])
    if biased is not None:
        at = _at(adjusted_SV, biased, "logit_bias")
        adjusted_SV.view(-1)[at] += _floats(biased.number_N, adjusted_SV)
    banned = _listed(
        [(i, dict.fromkeys(spec.banned, 0.0)) for i, spec in enumerate(specs) if spec.banned]
    )
    if banned is not None:
        adjusted_SV.view(-1)[_at(adjusted_SV, banned, "banned")] = -torch.inf
    return adjusted_SV


def _adjusts(spec: SampleSpec) -> bool:
    return bool(spec.seen or spec.logit_bias or spec.banned)


def _penalise(adjusted_SV: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    """Repetition penalties, then frequency and presence penalties, in place."""
    seen = _seen(specs)
    if seen is None:
        return
    at_N = _at(adjusted_SV, seen, "prompt or output")
    flat = adjusted_SV.view(-1)
    values_N = flat.index_select(0, at_N)
    factor_S = np.array([spec.repetition_penalty for spec in specs])
    if (factor_S != 1.0).any():
        factor_N = _floats(np.clip(factor_S, 1 / BOUND, BOUND)[seen.place_N], adjusted_SV)
        values_N = torch.where(values_N > 0, values_N / factor_N, values_N * factor_N)
    each_S = np.array([spec.frequency_penalty for spec in specs])
    once_S = np.array([spec.presence_penalty for spec in specs])
    if each_S.any() or once_S.any():
        # What is in the prompt only has come out 0 times, and is not meant.
        loss_N = each_S[seen.place_N] * seen.number_N + once_S[seen.place_N]
        values_N -= _floats(np.where(seen.number_N, loss_N, 0.0), adjusted_SV)
    flat.scatter_(0, at_N, values_N)


def _seen(specs: Sequence[SampleSpec]) -> _Entries | None:
    """The tokens that penalties are for, and how often each has come out."""
    asking = [(i, spec) for i, spec in enumerate(specs) if spec.seen]
    if not asking:
        return None
    tokens = [np.frombuffer(spec.seen, np.uint32) for _, spec in asking]
    return _Entries(
        np.repeat([i for i, _ in asking], [len(t) for t in tokens]),
        np.concatenate(tokens).astype(np.int64),
        np.concatenate([np.frombuffer(spec.seen_counts, np.uint32) for _, spec in asking]).astype(
            np.float64
        ),
    )


def _listed(numbers: Iterable[tuple[int, dict[int, float]]]) -> _Entries | None:
    entries = [(i, *item) for i, tokens in numbers for item in tokens.items()]
    if not entries:
        return None
    places, tokens, values = zip(*entries, strict=True)
    return _Entries(np.array(places), np.array(tokens, np.int64), np.array(values, np.float64))


def _floats(values_N: Doubles, like: torch.Tensor) -> torch.Tensor:
    bounded = np.clip(values_N, -BOUND, BOUND).astype(np.float32)
    return torch.from_numpy(bounded).to(like.device)


def _at(adjusted_SV: torch.Tensor, entries: _Entries, field: str) -> torch.Tensor:
    """Indices into all logits end to end."""
    size = adjusted_SV.shape[1]
    wrong = entries.token_N[(entries.token_N < 0) | (entries.token_N >= size)]
    if len(wrong):
        raise InvariantBroken(f"{field} names token {wrong[0]}; the vocabulary is 0 to {size - 1}")
    return torch.from_numpy(entries.place_N * size + entries.token_N).to(adjusted_SV.device)
