"""Thousands of random pairs of layouts: every element once, from the right source."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from kv_reshard_rules import CHECKS, Case, draw

from kv_transfer import reshard

PAIRS = 2400
CASES = [draw(seed) for seed in range(PAIRS)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_random_pairs_of_layouts(check: Callable[[ModuleType, Case], None]) -> None:
    for case in CASES:
        try:
            check(reshard, case)
        except AssertionError as error:
            raise AssertionError(f"seed {case.seed}: {case}") from error


def test_the_pairs_cover_what_they_should() -> None:
    """The draw itself: each kind of pair is there in number."""

    def count(holds: Callable[[Case], bool]) -> int:
        return sum(holds(case) for case in CASES)

    def replicated(case: Case) -> bool:
        return case.source.tp > case.source.num_kv_heads

    assert count(replicated) > 200
    assert count(lambda c: c.target.tp > c.target.num_kv_heads > 1) > 200
    assert count(lambda c: c.source.num_kv_heads == 1 and c.source.tp > 1) > 200
    assert count(lambda c: len({r.num_heads for r in c.target.ranks}) > 1) > 200
    assert count(lambda c: len({r.num_layers for r in c.target.ranks}) > 1) > 200
    assert count(lambda c: c.source.pp > 1 and c.target.pp > 1 and c.source.pp != c.target.pp) > 200
    assert count(lambda c: {c.source.tp, c.target.tp} == {1, 8}) > 20
    both = [(c.source.block_size, c.target.block_size) for c in CASES]
    assert sum(a % b != 0 and b % a != 0 for a, b in both) > 200
    assert count(lambda c: c.start % c.source.block_size != 0 < c.end - c.start) > 200
