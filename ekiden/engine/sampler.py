"""Sampling: a pure function of (logits, SampleSpec), the same in every batch and replica.

The order is vLLM's: penalties, logit_bias, banned, temperature, top-k, top-p, min-p, draw. The
filters keep the most likely tokens, lower ids first among equals; what is kept races (``draw``)
with numbers of (seed, position, token), so nothing depends on what else is in the batch. Only the
head of a row is sorted, and only for filters; more of it where they keep more.

Shape legend: R rows of logits, S specs (several may share a row), V vocabulary, K head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ekiden.core.errors import InvariantBroken
from ekiden.core.types import TokenLogprobs
from ekiden.engine.draw import race
from ekiden.engine.plan import SampleSpec

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would only overflow."""

HEADS = (256, 4096)
"""Most likely tokens of a row that are sorted at first, and at second if those did not do."""


BOUND = 1e30
"""Parameters are doubles and logits are not: beyond this they would turn into inf and NaN."""


class Choice(msgspec.Struct, frozen=True):
    """What one spec sampled."""

    token: int
    logprobs: TokenLogprobs | None


def sample(
    logits_RV: torch.Tensor, specs: Sequence[SampleSpec], rows: Sequence[int]
) -> list[Choice]:
    """Sample one token for each spec from row ``rows[i]`` of ``logits_RV`` (float32 [R, V]).

    Raises:
        InvariantBroken: a row holds NaN or +inf, nothing is left to choose from, or a spec names
            a token outside the vocabulary. No token is returned then.
    """
    if not specs:
        return []
    _check_raw(logits_RV)
    adjusted_SV = _adjusted(logits_RV, specs, rows)
    best, tokens = torch.max(adjusted_SV, dim=-1)
    _check_adjusted(best, specs)
    chosen: list[int] = tokens.tolist()
    random = [i for i, spec in enumerate(specs) if spec.temperature >= GREEDY_BELOW]
    if random:
        subset_SV = adjusted_SV if len(random) == len(specs) else adjusted_SV[random]
        drawn = _draw(subset_SV, [specs[i] for i in random])
        for i, token in zip(random, drawn, strict=True):
            chosen[i] = token
    logprobs = _logprobs(logits_RV, specs, rows, chosen)
    return [Choice(*pair) for pair in zip(chosen, logprobs, strict=True)]


def ranked(values_SV: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [S, k] of the k largest of each row, value descending, lower id first among equals."""
    if k >= values_SV.shape[1]:
        return torch.sort(values_SV, dim=-1, descending=True, stable=True).indices
    top, ids_SK = torch.topk(values_SV, k, dim=-1)
    # topk may take any of the tokens that tie at its edge: take the lowest ids instead.
    crowded = (values_SV >= top[:, -1:]).sum(-1) > k
    for i in crowded.nonzero().flatten().tolist():
        above = (values_SV[i] > top[i, -1]).nonzero().flatten()
        equal = (values_SV[i] == top[i, -1]).nonzero().flatten()
        ids_SK[i] = torch.cat((above, equal[: k - len(above)]))
    ids_SK = ids_SK.sort(dim=-1).values
    order = values_SV.gather(-1, ids_SK).sort(dim=-1, descending=True, stable=True).indices
    return ids_SK.gather(-1, order)


def _check_raw(logits_RV: torch.Tensor) -> None:
    # amax passes NaN on, so one number a row tells of NaN, +inf and a row masked throughout.
    bad = ~torch.isfinite(logits_RV.amax(dim=-1))
    if bad.any():
        raise InvariantBroken(
            f"the model's logits are NaN or infinite in rows {bad.nonzero().flatten().tolist()}: "
            "nothing was sampled; look for broken weights or an overflow in --dtype"
        )


def _check_adjusted(best_S: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    bad = ~torch.isfinite(best_S)
    if bad.any():
        first = next(compress(specs, bad.tolist()))
        raise InvariantBroken(
            f"no token can be chosen at output position {first.position}: "
            f"logit_bias ({len(first.logit_bias)} tokens) and the tokens banned there "
            f"({len(first.banned)}) leave nothing"
        )


def _adjusts(spec: SampleSpec) -> bool:
    penalised = spec.presence_penalty or spec.frequency_penalty or spec.repetition_penalty != 1.0
    return bool(penalised or spec.logit_bias or spec.banned)


def _adjusted(
    logits_RV: torch.Tensor, specs: Sequence[SampleSpec], rows: Sequence[int]
) -> torch.Tensor:
    """Logits [S, V] after penalties, bias and bans; ``logits_RV`` itself is never written."""
    touched = [i for i, spec in enumerate(specs) if _adjusts(spec)]
    if not touched and list(rows) == list(range(logits_RV.shape[0])):
        return logits_RV
    adjusted_SV = logits_RV.index_select(0, torch.tensor(rows, device=logits_RV.device))
    for i in touched:
        _adjust(adjusted_SV[i], specs[i])
    return adjusted_SV


def _adjust(logits_V: torch.Tensor, spec: SampleSpec) -> None:
    """Penalties, bias and bans of one spec, in place."""
    if spec.repetition_penalty != 1.0:
        seen = _ids(sorted({*spec.prompt, *spec.output}), logits_V, "prompt or output")
        values = logits_V[seen]
        factor = min(max(spec.repetition_penalty, 1 / BOUND), BOUND)
        logits_V[seen] = torch.where(values > 0, values / factor, values * factor)
    if spec.frequency_penalty or spec.presence_penalty:
        counts = Counter(spec.output)
        used = _ids(list(counts), logits_V, "output")
        logits_V[used] -= _floats(
            [spec.frequency_penalty * n + spec.presence_penalty for n in counts.values()], logits_V
        )
    if spec.logit_bias:
        biased = _ids(list(spec.logit_bias), logits_V, "logit_bias")
        logits_V[biased] += _floats(spec.logit_bias.values(), logits_V)
    if spec.banned:
        logits_V[_ids(list(spec.banned), logits_V, "banned")] = -torch.inf


def _floats(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    bounded = [min(max(value, -BOUND), BOUND) for value in values]
    return torch.tensor(bounded, dtype=like.dtype, device=like.device)


def _ids(tokens: list[int], logits_V: torch.Tensor, field: str) -> torch.Tensor:
    vocabulary = logits_V.shape[0]
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        wrong = next(t for t in tokens if not 0 <= t < vocabulary)
        raise InvariantBroken(
            f"{field} names token {wrong}; the vocabulary is 0 to {vocabulary - 1}"
        )
    return torch.tensor(tokens, dtype=torch.int64, device=logits_V.device)


def _draw(adjusted_SV: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """One random token for each row."""
    temperature = _floats([s.temperature for s in specs], adjusted_SV)[:, None]
    # The softmax kernels reduce each row by itself: a row's bits do not depend on its batch.
    shifted_SV = adjusted_SV - adjusted_SV.amax(dim=-1, keepdim=True)
    probs_SV = torch.softmax(shifted_SV / temperature, dim=-1)
    filtered = [i for i, spec in enumerate(specs) if _filters(spec)]
    heads_SK = dict(zip(filtered, ranked(adjusted_SV[filtered], HEADS[0]), strict=True))
    drawn = []
    for i, spec in enumerate(specs):
        head_K = heads_SK.get(i)
        weights_V = (
            _doubles(probs_SV[i])
            if head_K is None
            else _kept_weights(adjusted_SV[i], probs_SV[i], head_K, spec)
        )
        drawn.append(race(weights_V, spec.seed, spec.position))
    return drawn


def _filters(spec: SampleSpec) -> bool:
    return spec.top_k > 0 or spec.top_p < 1.0 or spec.min_p > 0.0


def _kept_weights(
    adjusted_V: torch.Tensor, probs_V: torch.Tensor, head_K: torch.Tensor, spec: SampleSpec
) -> NDArray[np.float64]:
    """The probabilities of the tokens that the filters keep, 0 for all others."""
    size = len(adjusted_V)
    for k in (HEADS[0], *HEADS[1:], size):
        ids_K = head_K if k == HEADS[0] else ranked(adjusted_V[None], k)[0]
        probs = _doubles(probs_V[ids_K])
        kept = _count_kept(probs, spec, whole=k >= size)
        if kept is not None:
            weights_V = np.zeros(size)
            weights_V[ids_K[:kept].cpu().numpy()] = probs[:kept]
            return weights_V
    raise InvariantBroken(f"the filters kept none of all {size} tokens")


def _doubles(values: torch.Tensor) -> NDArray[np.float64]:
    return np.asarray(values.cpu().double().numpy())


def _count_kept(probs: NDArray[np.float64], spec: SampleSpec, *, whole: bool) -> int | None:
    """How many of ``probs`` (sorted, descending) are kept; None if more of the row is needed.

    ``whole`` says that ``probs`` is the whole row and not only its head. Each filter keeps a
    prefix; ``total`` is the mass of what is kept so far.
    """
    sums = np.cumsum(probs)
    size, total = len(probs), 1.0
    if spec.top_k > 0:
        if spec.top_k > size and not whole:
            return None
        size = min(spec.top_k, size)
        total, whole = float(sums[size - 1]), True
    if spec.top_p < 1.0:
        # A token stays while the mass before it is short of top_p.
        if not whole and sums[-1] < spec.top_p:
            return None
        size = int(np.count_nonzero(sums[: size - 1] < spec.top_p * total)) + 1
        whole = True
    if spec.min_p > 0.0:
        kept = max(1, int(np.count_nonzero(probs[:size] >= spec.min_p * probs[0])))
        if kept == size and not whole:
            return None
        size = kept
    return size


def _logprobs(
    logits_RV: torch.Tensor,
    specs: Sequence[SampleSpec],
    rows: Sequence[int],
    tokens: Sequence[int],
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the raw logits, for the specs that ask."""
    wanted = sorted(
        {row for row, spec in zip(rows, specs, strict=True) if spec.logprobs is not None}
    )
    if not wanted:
        return [None] * len(specs)
    place = {row: i for i, row in enumerate(wanted)}
    logprobs_RV = torch.log_softmax(logits_RV[wanted].float(), dim=-1)
    most = min(max(spec.logprobs or 0 for spec in specs), logits_RV.shape[1])
    ids = (
        ranked(logprobs_RV, most).cpu() if most else torch.empty(len(wanted), 0, dtype=torch.int64)
    )
    out: list[TokenLogprobs | None] = []
    for spec, row, token in zip(specs, rows, tokens, strict=True):
        if spec.logprobs is None:
            out.append(None)
            continue
        values_V = logprobs_RV[place[row]]
        top = ids[place[row], : spec.logprobs]
        pairs = zip(top.tolist(), values_V[top.to(values_V.device)].tolist(), strict=True)
        out.append(TokenLogprobs(token, float(values_V[token]), tuple(pairs)))
    return out
