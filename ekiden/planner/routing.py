"""To how many hosts and ranks a token goes whose experts are dealt over them."""

from __future__ import annotations

from functools import lru_cache
from math import comb

import msgspec

from ekiden.planner.geometry import Geometry
from ekiden.planner.parts import Moe


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """A token takes ``top_k`` experts, all equally likely, from ``top_groups`` of ``groups`` that
    lie together."""

    top_k: int
    groups: int = 1
    top_groups: int = 1

    def reached(self, places: int) -> float:
        """How many of ``places``, with equal parts of the experts in order, have one of a token's,
        on average.

        A place has none with probability (1 - 1/places)^k; with a limit to groups also where none
        of its own is taken. Places that groups do not divide are counted as without a limit.
        """
        return _reached(self, places)


@lru_cache(maxsize=512)
def _reached(routing: Routing, places: int) -> float:
    groups, most = routing.groups, routing.top_groups
    if places % groups and groups % places:
        groups = most = 1
    own, share = max(1, groups // places), min(1.0, groups / places)
    missed = 0.0
    for taken in range(min(own, most) + 1):
        chance = comb(own, taken) * comb(groups - own, most - taken) / comb(groups, most)
        missed += chance * (1 - share * taken / most) ** routing.top_k
    return places * (1 - missed)


def routing(geometry: Geometry) -> Routing:
    """Of the model's layers with experts; of a dense model, one that reaches one place."""
    for layer in geometry.kinds:
        if isinstance(mlp := layer.mlp, Moe):
            return Routing(top_k=mlp.top_k, groups=mlp.groups, top_groups=mlp.top_groups)
    return Routing(top_k=1)
