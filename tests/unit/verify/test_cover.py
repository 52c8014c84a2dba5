"""The cells that are run with real processes: what they cover, and what starting them costs."""

import itertools
from collections import Counter

import pytest

from ekiden.verify.cover import Tile, combinations_of, cover, wanted
from ekiden.verify.layouts import FULL, Layout, Pair

AXES = ("tp", "pp", "block_size", "kv")


@pytest.fixture(scope="module")
def tiles() -> list[Tile]:
    return cover(FULL)


@pytest.fixture(scope="module")
def cells(tiles: list[Tile]) -> list[Pair]:
    return [cell for tile in tiles for cell in tile.cells()]


def test_every_two_values_of_any_two_axes_of_the_two_sides_occur(cells: list[Pair]) -> None:
    names = [(side, axis) for side in (0, 1) for axis in AXES]
    for (s1, a1), (s2, a2) in itertools.combinations(names, 2):
        found = {(getattr(cell[s1], a1), getattr(cell[s2], a2)) for cell in cells}
        assert found == set(itertools.product(getattr(FULL, a1), getattr(FULL, a2)))


def test_all_64_pairs_of_tp_and_pp_occur_between_equal_kv_dtypes(cells: list[Pair]) -> None:
    splits = {(p.tp, p.pp, d.tp, d.pp) for p, d in cells if p.kv == d.kv}
    assert splits == set(itertools.product(FULL.tp, FULL.pp, FULL.tp, FULL.pp))


def test_there_are_about_200_cells_and_none_twice(cells: list[Pair]) -> None:
    assert len(cells) == len(set(cells)) == 192


def test_no_replica_starts_twice_and_few_are_alive_at_once(tiles: list[Tile]) -> None:
    for side in ("prefill", "decode"):
        starts = Counter(layout for tile in tiles for layout in getattr(tile, side))
        assert max(starts.values()) == 1
    assert max(len(tile.prefill) for tile in tiles) == 4


def test_what_is_wanted_is_what_is_counted() -> None:
    """No more than all cells together have, and no less."""
    layouts = FULL.layouts()
    every = combinations_of(itertools.product(layouts, layouts))
    assert every == wanted(FULL)
    assert wanted(FULL) - combinations_of([(Layout(kv="int8"), Layout(kv="int8"))])
