"""What a rank reads is the plan that was made, however its tables were sent before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.core.errors import InvariantBroken
from ekiden.engine import tables
from ekiden.engine.plan import Chunk, StepPlan
from ekiden.engine.tables import TablePacker, TableReader


def plan(step: int, *rows: tuple[int, tuple[int, ...]]) -> StepPlan:
    return StepPlan(step, tuple(Chunk(sequence, (1,), 0, blocks) for sequence, blocks in rows))


def sent(packer: TablePacker, reader: TableReader, whole: StepPlan) -> int:
    """How many blocks went over; what came out is what went in."""
    packed, kept = packer.pack(whole)
    assert reader.unpack(packed, kept) == whole
    return sum(len(chunk.blocks) for chunk in packed.chunks)


steps = st.lists(
    st.dictionaries(st.integers(1, 4), st.lists(st.integers(0, 2), max_size=4).map(tuple)),
    max_size=30,
)


@given(steps=steps, forget=st.integers(1, 9))
def test_plans_come_out_as_they_went_in(
    steps: list[dict[int, tuple[int, ...]]], forget: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "FORGET_STEPS", forget)
        packer, reader = TablePacker(), TableReader()
        for number, rows in enumerate(steps):
            sent(packer, reader, plan(number, *rows.items()))


def test_only_new_blocks_are_sent_and_all_of_them_after_a_preemption() -> None:
    packer, reader = TablePacker(), TableReader()
    assert sent(packer, reader, plan(1, (5, (3, 4)), (6, (9,)))) == 3
    assert sent(packer, reader, plan(2, (5, (3, 4)), (6, (9, 8)))) == 1
    assert sent(packer, reader, plan(3, (5, (3,)))) == 0
    assert sent(packer, reader, plan(4, (5, (7, 4)), (6, (9, 8)))) == 2


def test_who_was_away_for_long_is_forgotten_at_both_ends() -> None:
    packer, reader = TablePacker(), TableReader()
    sent(packer, reader, plan(0, (5, (3, 4))))
    for step in range(1, 3 * tables.FORGET_STEPS):
        sent(packer, reader, plan(step, (6, (1,))))
    assert len(packer._tables._tables | packer._tables._before) == 1
    assert sent(packer, reader, plan(9999, (5, (3, 4)))) == 2


def test_a_plan_that_goes_on_from_blocks_nobody_sent_is_refused() -> None:
    packer = TablePacker()
    packer.pack(plan(1, (5, (3, 4))))
    with pytest.raises(InvariantBroken, match="sequence 5 goes on from 2 blocks, and 0 are known"):
        TableReader().unpack(*packer.pack(plan(2, (5, (3, 4)))))
