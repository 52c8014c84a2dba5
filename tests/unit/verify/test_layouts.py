"""Layouts are read as they are written, and a grid tries every pair once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.core.errors import SetupError
from ekiden.verify.layouts import GRIDS, Layout
from ekiden.verify.prompts import prompt_lengths


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([16, 32, 64]))
def test_a_layout_reads_back_what_it_writes(tp: int, pp: int, block: int) -> None:
    layout = Layout(tp=tp, pp=pp, block_size=block)
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["", "TP", "2", "TP2PP", "TP2/x", "XP2", "/32"])
def test_what_is_no_layout_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(SetupError, match="TP2xPP2"):
        Layout.parse(text)


def test_the_small_grid_is_the_one_that_is_promised() -> None:
    cells = {(str(p), str(d)) for p, d in GRIDS["small"].cells()}
    assert cells == {
        (p, d)
        for p in ("TP1", "TP2", "TP3", "PP2", "TP2xPP2")
        for d in ("TP1", "TP2", "TP3", "PP2")
    }


@pytest.mark.parametrize("block", [16, 32])
def test_the_prompts_stand_around_every_border(block: int) -> None:
    lengths = prompt_lengths(block, 20)
    assert len(lengths) == 20
    assert {1, block - 1, block, block + 1, 3 * block + 5, 500} <= set(lengths)
    assert all(1 <= length <= 500 for length in lengths)
