"""Layouts are read as they are written, and a grid tries every pair once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.core.errors import SetupError
from ekiden.verify.layouts import FULL, GRIDS, Layout, sample
from ekiden.verify.prompts import prompt_lengths

KINDS = ("", "float32", "int8", "fp8_e4m3")


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([16, 32, 64]), st.sampled_from(KINDS))
def test_a_layout_reads_back_what_it_writes(tp: int, pp: int, block: int, kv: str) -> None:
    layout = Layout(tp=tp, pp=pp, block_size=block, kv=kv)
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["", "TP", "2", "TP2PP", "TP2/x", "XP2", "/32", ":int8"])
def test_what_is_no_layout_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(SetupError, match="TP2xPP2"):
        Layout.parse(text)


def test_an_unknown_kv_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(SetupError, match=r"TP2:int4.*bfloat16.*fp8_e4m3"):
        Layout.parse("TP2:int4")


def test_the_small_grid_is_the_one_that_is_promised() -> None:
    cells = {(str(p), str(d)) for p, d in GRIDS["small"].cells()}
    assert cells == {
        (p, d)
        for p in ("TP1", "TP2", "TP3", "PP2", "TP2xPP2")
        for d in ("TP1", "TP2", "TP3", "PP2")
    }


def test_the_full_grid_is_every_pair_of_96_layouts() -> None:
    cells = GRIDS["full"].cells()
    assert len(FULL.layouts()) == len(set(FULL.layouts())) == 96
    assert len(cells) == len(set(cells)) == 9216


@pytest.mark.parametrize("count", [1, 7, 200])
def test_a_sample_is_a_part_in_order_that_its_seed_decides_and_opens_few_replicas(
    count: int,
) -> None:
    cells = GRIDS["full"].cells()
    drawn = sample(cells, count, seed=3)
    assert len(drawn) == len(set(drawn)) == count
    assert drawn == sorted(drawn, key=cells.index) == sample(cells, count, seed=3)
    assert drawn != sample(cells, count, seed=4)
    assert sum(len({cell[side] for cell in drawn}) for side in (0, 1)) <= 2.5 * count**0.5 + 2


@pytest.mark.parametrize("count", [0, 9216, 10000])
def test_a_sample_of_none_or_of_too_many_is_all(count: int) -> None:
    assert sample(GRIDS["full"].cells(), count, seed=0) == GRIDS["full"].cells()


@pytest.mark.parametrize("block", [16, 32])
def test_the_prompts_stand_around_every_border(block: int) -> None:
    lengths = prompt_lengths([block], 20)
    assert len(lengths) == 20
    assert {1, block - 1, block, block + 1, 3 * block + 5, 500} <= set(lengths)
    assert all(1 <= length <= 500 for length in lengths)


def test_where_block_sizes_differ_the_prompts_stand_around_the_borders_of_all() -> None:
    lengths = prompt_lengths([16, 32, 48], 12)
    assert {1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 149, 500} == set(lengths)
