"""A prefix whose KV another replica writes: its blocks are held, then found like computed ones."""

from __future__ import annotations

import pytest
from engine_fakes import PROMPT, Collected, make_engine, make_request

from ekiden.core.clock import ManualClock
from ekiden.core.errors import InvariantBroken
from ekiden.engine.engine import WHOLE_AUDIT_S, PrefillDone, Ready, Started

SIZE = 4
"""Of a block of the fake engine."""


def test_a_prefix_that_was_written_is_found_by_the_request_that_comes_for_it() -> None:
    engine, _ = make_engine()
    prefix = PROMPT[: 2 * SIZE]
    held = engine.hold_prefix(prefix, "")
    assert held is not None
    assert (len(held.blocks), held.held_tokens) == (2, 0)
    assert engine.cached_prefix(make_request(prompt=PROMPT)) == 0  # not before it is written
    engine.publish_prefix(prefix, "", held.blocks)
    engine.writer_done(held.key)
    assert engine.books().idle
    said = Collected(engine)
    engine.add_handoff(make_request(prompt=PROMPT))
    said.step()
    engine.open_session("r", 7)
    said.run()
    assert said.events == [Ready("r"), Started("r", 8), PrefillDone("r", 8, len(PROMPT) - 8)]


def test_of_a_prefix_only_the_part_that_is_missing_is_written() -> None:
    engine, _ = make_engine()
    first = engine.hold_prefix(PROMPT[:SIZE], "")
    assert first is not None
    engine.publish_prefix(PROMPT[:SIZE], "", first.blocks)
    engine.writer_done(first.key)
    both = engine.hold_prefix(PROMPT[: 2 * SIZE], "")
    assert both is not None
    assert both.held_tokens == SIZE
    assert both.blocks[0] == first.blocks[0]
    engine.writer_done(both.key)
    assert engine.books().idle


def test_a_prefix_of_another_tenant_is_not_found() -> None:
    engine, _ = make_engine()
    prefix = PROMPT[: 2 * SIZE]
    held = engine.hold_prefix(prefix, "one")
    assert held is not None
    engine.publish_prefix(prefix, "one", held.blocks)
    assert engine.cached_prefix(make_request(prompt=PROMPT)) == 0
    engine.writer_done(held.key)


def test_without_room_nothing_is_held() -> None:
    engine, _ = make_engine(num_blocks=2)
    assert engine.hold_prefix(PROMPT[:SIZE] * 3, "") is None
    assert engine.books().idle


def test_scratch_blocks_push_nothing_cached_out() -> None:
    engine, _ = make_engine(num_blocks=4)
    prefix = PROMPT[: 2 * SIZE]
    held = engine.hold_prefix(prefix, "")
    assert held is not None
    engine.publish_prefix(prefix, "", held.blocks)
    engine.writer_done(held.key)
    scratch = engine.hold_free(100)
    assert len(scratch.blocks) == 2
    assert engine.cached_prefix(make_request(prompt=PROMPT)) == 8
    engine.writer_done(scratch.key)
    assert engine.books().free == 2
    assert engine.hold_free(0).blocks == ()


def test_where_all_is_cached_one_scratch_block_is_made_and_where_all_is_held_none() -> None:
    engine, _ = make_engine(num_blocks=2)
    prefix = PROMPT[: 2 * SIZE]
    held = engine.hold_prefix(prefix, "")
    assert held is not None
    engine.publish_prefix(prefix, "", held.blocks)
    assert engine.hold_free(100).blocks == ()
    engine.writer_done(held.key)
    assert engine.books().cached == 2
    for _ in range(3):
        scratch = engine.hold_free(100)
        assert len(scratch.blocks) == 1
        engine.writer_done(scratch.key)
    assert (engine.books().cached, engine.books().free) == (1, 1)


def test_an_idle_engine_looks_at_every_block_now_and_then_and_at_the_owners_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look at every block of a large pool takes milliseconds that a request would wait for."""
    engine, _ = make_engine()
    clock = engine._clock
    assert isinstance(clock, ManualClock)
    looks: list[float] = []
    monkeypatch.setattr(engine.pool, "check", lambda: looks.append(clock.now()))
    for _ in range(5):
        engine.next_plan()
        clock.advance(WHOLE_AUDIT_S / 2)
    assert looks == [0.0, WHOLE_AUDIT_S, 2 * WHOLE_AUDIT_S]
    engine.pool.allocate(1)  # by nobody: a leak
    with pytest.raises(InvariantBroken, match="owners of blocks do not add up"):
        engine.next_plan()
