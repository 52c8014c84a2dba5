"""Experts that are hit unevenly: how popular each one is, and where the tokens of a step go.

Popularity follows Zipf's law: of a layer's experts, the n-th most popular one is wanted in
proportion to n^-skew. A prompt has a domain, and each domain has favourites of its own in each
layer, as experts of OLMoE specialise in the domain of a text (Muennighoff et al.,
arXiv:2409.02060): a step whose prompts are of one kind is more uneven than a mixed one. A token
takes each expert by itself, with the chance that makes ``top_k`` of them in the mean: none twice.

Shape suffixes: D domains, L layers, E experts, R ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ekiden.engine.scheduling.schedule import ScheduledChunk
from ekiden.measures.experts import ExpertLoad, balancedness
from ekiden.parallel.split import even_split
from ekiden.planner.parts import Moe
from ekiden.planner.routed import Routed
from ekiden.planner.steps import Stepper
from ekiden.sim.asked import Asked
from ekiden.sim.costs import Cost, Costs

DOMAINS = 4
"""Kinds of prompts, as many requests of each."""
LAYERS = 8
"""That are drawn, at most: they stand for all."""
_ROUNDING = 1e-9


class Popularity:
    """Of the experts of one model, whichever replica has them."""

    def __init__(self, mixture: Moe, layers: int, skew: float, rng: np.random.Generator) -> None:
        ranks_E = np.arange(1, mixture.experts + 1, dtype=float)
        chance_E = chances(ranks_E**-skew, mixture.top_k)
        self.shape = min(layers, LAYERS), mixture.experts
        each_DLE = np.broadcast_to(chance_E, (DOMAINS, *self.shape))
        self._chance_DLE = rng.permuted(each_DLE, axis=2)

    def draw(self, tokens_D: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        """[L, E]: how many of a step's tokens, so many of each domain, take each expert."""
        total = tokens_D.sum()
        chance_LE = np.tensordot(tokens_D / total, self._chance_DLE, 1)
        return rng.binomial(int(total), np.minimum(chance_LE, 1.0))


def chances(weight_E: NDArray[Any], taken: int) -> NDArray[Any]:
    """Of each expert to be among the ``taken`` of a token: in proportion to its weight, at most 1;
    they add up to ``taken``."""
    sure_E = np.zeros(weight_E.shape, dtype=bool)
    while True:
        rest = weight_E[~sure_E].sum()
        chance_E = np.where(sure_E, 1.0, weight_E / rest * (taken - sure_E.sum()))
        over_E = chance_E > 1.0 + _ROUNDING
        if not over_E.any():
            return np.minimum(chance_E, 1.0)
        sure_E |= over_E


class Experts:
    """Those of a pool's replicas: draws where the tokens of each step go, and keeps account."""

    def __init__(
        self,
        stepper: Stepper,
        popularity: Popularity,
        domains: Mapping[int, int],
        rng: np.random.Generator,
    ) -> None:
        """``domains``: of the requests, by number."""
        geometry, layout = stepper.replica.geometry, stepper.replica.layout
        bounds = even_split(geometry.experts, layout.ep)
        self._starts = [start for start, _ in bounds]
        self._most = max(stop - start for start, stop in bounds)
        self._popularity, self._domains, self._rng = popularity, domains, rng
        self._tokens_LE = np.zeros(popularity.shape, dtype=np.int64)
        self._balancedness: list[float] = []
        self._dispatch_s = self._step_s = 0.0

    def step(self, costs: Costs, chunks: list[ScheduledChunk], numbers: Iterable[int]) -> Cost:
        """A step of ``chunks``, which are of the requests of those ``numbers``."""
        tokens_D = np.zeros(DOMAINS)
        for chunk, number in zip(chunks, numbers, strict=True):
            tokens_D[self._domains[number]] += chunk.stop - chunk.start
        routed = self._route(tokens_D)
        batch = msgspec.structs.replace(costs.batch(chunks), routed=routed)
        cost = costs.of(batch)
        self._balancedness.append(1 / routed.busiest)
        self._dispatch_s += costs.stepper.dispatch(batch)
        self._step_s += cost.latency
        return cost

    def _route(self, tokens_D: NDArray[Any]) -> Routed:
        tokens_LE = self._popularity.draw(tokens_D, self._rng)
        self._tokens_LE += tokens_LE
        touched_LR = np.add.reduceat(tokens_LE > 0, self._starts, axis=1, dtype=float)
        return Routed(
            np.add.reduceat(tokens_LE, self._starts, axis=1, dtype=float), touched_LR / self._most
        )

    def load(self) -> ExpertLoad | None:
        """Of all steps; None where there were none."""
        if not self._balancedness:
            return None
        return ExpertLoad(
            steps=len(self._balancedness),
            tokens=self._tokens_LE.tolist(),
            balancedness=balancedness(self._balancedness),
            dispatch_share=self._dispatch_s / self._step_s,
        )


def uneven(
    steppers: Mapping[str, Stepper], skew: float | None, seed: int, asked: Sequence[Asked]
) -> dict[str, Experts]:
    """By role, for the pools of one model; nothing where no skew is asked for."""
    if skew is None:
        return {}
    chance = random.Random(f"{seed} experts")
    domains = {one.number: chance.randrange(DOMAINS) for one in asked}
    found: dict[str, Experts] = {}
    popularity: Popularity | None = None
    for role, stepper in steppers.items():
        mixtures = [x.mlp for x in stepper.replica.geometry.layers if isinstance(x.mlp, Moe)]
        popularity = popularity or Popularity(mixtures[0], len(mixtures), skew, _rng(chance))
        found[role] = Experts(stepper, popularity, domains, _rng(chance))
    return found


def _rng(chance: random.Random) -> np.random.Generator:
    return np.random.default_rng(chance.getrandbits(64))
