"""Whoever was refused a reservation hears of room as soon as there may be some."""

from __future__ import annotations

from engine_fakes import make_engine, make_request

from ekiden.engine.engine import Engine

LONG = tuple(range(1, 41))


def heard_of_room(engine: Engine) -> bool:
    return engine.take_output().room


def full_engine(late: bool = False) -> Engine:
    """Ten of sixteen blocks are held by a request that runs; another long prompt finds no room."""
    engine, _ = make_engine(late=late, caching=False)
    engine.add(make_request("first", LONG, max_tokens=20))
    engine.step(1.0)
    engine.step(1.0)
    assert engine.reserve(make_request("second", LONG)) is None
    heard_of_room(engine)
    return engine


def test_a_cancelled_request_makes_room() -> None:
    engine = full_engine()
    engine.cancel("first")
    assert heard_of_room(engine)
    assert engine.reserve(make_request("second", LONG)) is not None


def test_blocks_that_a_step_still_used_make_room_when_it_ends() -> None:
    engine = full_engine(late=True)
    plan = engine.next_plan()
    assert plan is not None
    engine.executor.submit(plan)
    engine.cancel("first")
    heard_of_room(engine)
    assert engine.reserve(make_request("second", LONG)) is None
    engine.apply(engine.executor.collect(1.0))
    assert heard_of_room(engine)
    assert engine.reserve(make_request("second", LONG)) is not None


def test_a_writer_that_lets_go_makes_room() -> None:
    engine, _ = make_engine(caching=False)
    first = engine.reserve(make_request("first", LONG))
    assert first is not None
    engine.cancel("first")
    heard_of_room(engine)
    assert engine.reserve(make_request("second", LONG)) is None
    engine.writer_done(first.key)
    assert heard_of_room(engine)
    assert engine.reserve(make_request("second", LONG)) is not None


def test_one_less_that_waits_before_it_makes_room() -> None:
    engine, _ = make_engine(caching=False)
    engine.add(make_request("waits", LONG))
    assert engine.reserve(make_request("second", LONG)) is None
    heard_of_room(engine)
    engine.cancel("waits")
    assert heard_of_room(engine)
    assert engine.reserve(make_request("second", LONG)) is not None


def test_nothing_is_told_while_nothing_is_freed() -> None:
    engine = full_engine()
    engine.step(1.0)
    assert not heard_of_room(engine)
