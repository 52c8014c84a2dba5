"""Sampling: a pure function of (logits, SampleSpec), the same in every batch and replica.

The order is vLLM's: penalties, logit_bias, banned (``penalties``), temperature, top-k, top-p,
min-p, draw. The filters keep the most likely tokens, lower ids first among equals; what is kept
races (``draw``) with numbers of (seed, position, token), so nothing depends on what else is in the
batch. Only the head of a row is sorted, and only for filters; more of it where they keep more.

Shape legend: R rows of logits, S specs (several may share a row), V vocabulary, K head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ekiden.core.errors import InvariantBroken
from ekiden.core.types import TokenLogprobs
from ekiden.engine.draw import Keys, race, race_all, race_kept
from ekiden.engine.filters import Filters
from ekiden.engine.penalties import BOUND, adjusted
from ekiden.engine.plan import SampleSpec
from ekiden.engine.ranking import ranked

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would only overflow."""

HEADS = (64, 512)
"""Most likely tokens of a row that are sorted at first, and at second if those did not do."""

ROWS = 4
"""Rows whose probabilities a CPU computes at once: more would not stay in its L2 cache."""

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]


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
    adjusted_SV = adjusted(logits_RV, specs, rows)
    chosen_S = _argmax(adjusted_SV)
    if adjusted_SV is logits_RV:
        _check_raw(_at(logits_RV, chosen_S))
    else:
        # What is adjusted may hide what is broken.
        _check_raw(logits_RV.amax(dim=-1))
        _check_adjusted(_at(adjusted_SV, chosen_S), specs)
    chosen: list[int] = chosen_S.tolist()
    random = [i for i, spec in enumerate(specs) if spec.temperature >= GREEDY_BELOW]
    if random:
        drawn_D = _Draw(adjusted_SV, chosen_S, specs).draw(np.array(random))
        for i, token in zip(random, drawn_D.tolist(), strict=True):
            chosen[i] = token
    logprobs = _logprobs(logits_RV, specs, rows, chosen)
    return [Choice(*pair) for pair in zip(chosen, logprobs, strict=True)]


def _argmax(values_SV: torch.Tensor) -> Ints:
    """The best token of each row, the lowest among equals."""
    if values_SV.device.type == "cpu":
        # Ten times as fast as torch's, which looks for NaN as it goes.
        return np.asarray(values_SV.numpy().argmax(axis=1))
    return np.asarray(torch.argmax(values_SV, dim=-1).cpu().numpy())


def _at(values_SV: torch.Tensor, ids_S: Ints) -> torch.Tensor:
    """One number a row."""
    return values_SV.gather(1, torch.from_numpy(ids_S).to(values_SV.device)[:, None])[:, 0]


def _check_raw(best_R: torch.Tensor) -> None:
    # The best passes NaN on, so one number a row tells of NaN, +inf and a row masked throughout.
    bad = ~torch.isfinite(best_R)
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


class _Draw:
    """The random rows of one batch; rows are places in its specs."""

    def __init__(
        self, adjusted_SV: torch.Tensor, best_S: Ints, specs: Sequence[SampleSpec]
    ) -> None:
        """``best_S`` are the rows' most likely tokens."""
        device = adjusted_SV.device
        heat_S = np.minimum([spec.temperature for spec in specs], BOUND).astype(np.float32)
        self._adjusted_SV = adjusted_SV
        self._best_S1 = _at(adjusted_SV, best_S)[:, None]
        self._heat_S1 = torch.from_numpy(heat_S).to(device)[:, None]
        self._filters = Filters.of(specs)
        self._specs = specs
        self._keys = Keys.of([spec.seed for spec in specs], [spec.position for spec in specs])
        self._drawn_S = np.empty(len(specs), np.int64)

    def draw(self, rows: Ints) -> Ints:
        """One token for each of ``rows``."""
        filtered = self._filters.any_S[rows]
        for some in self._pieces(rows[~filtered]):
            self._drawn_S[some] = race_all(self._probabilities(some), self._keys.pick(some))
        left = rows[filtered]
        for k in HEADS:
            if len(left):
                left = self._draw_from_heads(left, k)
        for row in left.tolist():
            self._drawn_S[row] = self._draw_from_all(row)
        return self._drawn_S[rows]

    def _pieces(self, rows: Ints) -> list[Ints]:
        size = ROWS if self._adjusted_SV.device.type == "cpu" else max(1, len(rows))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _probabilities(self, rows: Ints) -> torch.Tensor:
        """float32 [rows, V]. Softmax reduces each row by itself, whatever its batch."""
        at: slice | torch.Tensor
        if rows[-1] - rows[0] + 1 == len(rows):
            at = slice(int(rows[0]), int(rows[-1]) + 1)
        else:
            at = torch.from_numpy(rows).to(self._adjusted_SV.device)
        scaled = self._adjusted_SV[at] - self._best_S1[at]
        scaled /= self._heat_S1[at]
        return torch.softmax(scaled, dim=-1, out=scaled)

    def _draw_from_heads(self, rows: Ints, k: int) -> Ints:
        """Draw those of ``rows`` for which the ``k`` most likely tokens do; return the others."""
        size = self._adjusted_SV.shape[1]
        ids = ranked(_pick(self._adjusted_SV, rows), k)
        pieces = zip(self._pieces(rows), self._pieces(ids), strict=True)
        weights = np.concatenate([_gather(self._probabilities(some), at) for some, at in pieces])
        kept, known = self._filters.pick(rows).count_kept(weights, whole=k >= size)
        done = rows[known]
        if len(done):
            keys = self._keys.pick(done)
            self._drawn_S[done] = race_kept(ids[known], weights[known], kept[known], size, keys)
        return rows[~known]

    def _draw_from_all(self, row: int) -> int:
        """The same where the filters keep more than any head."""
        at = np.array([row])
        ids = ranked(_pick(self._adjusted_SV, at), self._adjusted_SV.shape[1])
        weights = _gather(self._probabilities(at), ids)
        kept, _ = self._filters.pick(at).count_kept(weights, whole=True)
        weights_V = np.zeros(ids.shape[1])
        weights_V[ids[0, : kept[0]]] = weights[0, : kept[0]]
        return race(weights_V, self._specs[row].seed, self._specs[row].position)


def _pick(values_SV: torch.Tensor, rows: Ints) -> torch.Tensor:
    if len(rows) == len(values_SV):
        return values_SV
    return values_SV.index_select(0, torch.from_numpy(rows).to(values_SV.device))


def _gather(values: torch.Tensor, ids: Ints) -> Doubles:
    """Numbers of each row at ``ids`` [rows, K], in double."""
    at = torch.from_numpy(ids).to(values.device)
    return np.asarray(values.gather(1, at).cpu().double().numpy())


def _logprobs(
    logits_RV: torch.Tensor,
    specs: Sequence[SampleSpec],
    rows: Sequence[int],
    tokens: Sequence[int],
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the raw logits, for the specs that ask."""
    asking = [i for i, spec in enumerate(specs) if spec.logprobs is not None]
    out: list[TokenLogprobs | None] = [None] * len(specs)
    if not asking:
        return out
    wanted = sorted({rows[i] for i in asking})
    place = {row: i for i, row in enumerate(wanted)}
    logprobs_RV = torch.log_softmax(logits_RV[wanted].float(), dim=-1)
    top_RK = ranked(logprobs_RV, max(spec.logprobs or 0 for spec in specs))
    values_RK = logprobs_RV.gather(1, torch.from_numpy(top_RK).to(logprobs_RV.device)).tolist()
    at = [place[rows[i]] for i in asking], [tokens[i] for i in asking]
    for i, value in zip(asking, logprobs_RV[at].tolist(), strict=True):
        row, count = place[rows[i]], specs[i].logprobs
        pairs = zip(top_RK[row, :count].tolist(), values_RK[row][:count], strict=True)
        out[i] = TokenLogprobs(tokens[i], value, tuple(pairs))
    return out
