"""The loop on its executor's thread: calls are answered at once, errors told once, an end ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_fakes import Collected, FakeExecutor, make_engine, make_request, reference

from ekiden.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EkidenError,
    ReplicaFailed,
    Unavailable,
)
from ekiden.core.types import Delta, Request
from ekiden.engine.engine import Engine, EngineOutput
from ekiden.engine.loop import EngineLoop
from ekiden.engine.plan import StepPlan, StepResult

WAIT = 20.0


class Gated:
    """The fake executor, whose steps end only when they are let through, and its thread."""

    def __init__(self, inner: FakeExecutor) -> None:
        self.inner = inner
        self.num_blocks, self.max_in_flight = inner.num_blocks, inner.max_in_flight
        self.submitted = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.failure: EkidenError | None = None
        self.threads: set[int] = set()
        self.woken = threading.Event()
        self.closed = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def host(self, turn: Callable[[], None]) -> None:
        self.turn = turn
        self.thread.start()

    def _run(self) -> None:
        while not self.closed:
            assert self.woken.wait(WAIT), "nobody woke the thread to close it"
            self.woken.clear()
            self.turn()

    def wake(self) -> None:
        self.woken.set()

    def submit(self, plan: StepPlan) -> None:
        self.threads.add(threading.get_ident())
        self.inner.submit(plan)
        self.submitted.release()
        self.wake()

    def poll(self, timeout_s: float) -> StepResult | None:
        self.threads.add(threading.get_ident())
        if not self.allowed.acquire(blocking=False):
            return None
        if self.error is not None:
            raise self.error
        return self.inner.collect(timeout_s)

    def open(self) -> None:
        self.allowed.release(10_000)
        self.wake()

    def close(self) -> None:
        self.closed = True
        self.wake()
        self.thread.join(WAIT)


class Harness:
    """A loop over a gated executor, and what it said."""

    def __init__(self, **engine: Any) -> None:
        self.engine, inner = make_engine(**engine)
        self.executor = Gated(inner)
        self.engine.executor = self.executor  # type: ignore[assignment]
        self.said = Collected(self.engine)
        self.fatal: list[BaseException] = []
        self.changed = threading.Condition()
        self.loop = EngineLoop(self.engine, self.executor, self.on_output, self.on_fatal)
        self.loop.start()

    def on_output(self, output: EngineOutput) -> None:
        with self.changed:
            self.said.take(output)
            self.changed.notify_all()

    def on_fatal(self, error: BaseException) -> None:
        with self.changed:
            self.fatal.append(error)
            self.changed.notify_all()

    def until(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT)


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    each = Harness(**getattr(request, "param", {}))
    yield each
    each.executor.open()
    each.loop.stop(WAIT)
    each.executor.close()


def test_requests_added_by_calls_are_answered(harness: Harness) -> None:
    harness.executor.open()
    requests = [make_request(f"r{i}", (i, 2, 3)) for i in range(5)]
    for request in requests:
        harness.loop.call(lambda engine, request=request: engine.add(request)).result(WAIT)
    harness.until(lambda: len(harness.said.finished) == 5)
    for request in requests:
        assert harness.said.answer(request.request_id) == reference(request, 0)
    assert harness.executor.threads == {harness.executor.thread.ident}


@pytest.mark.parametrize("harness", [{"ahead": True, "late": True}], indirect=True)
def test_a_step_planned_ahead_is_with_the_ranks_before_the_one_before_it_ends(
    harness: Harness,
) -> None:
    harness.loop.call(lambda engine: engine.add(make_request())).result(WAIT)
    for _ in range(2):
        assert harness.executor.submitted.acquire(timeout=WAIT), "nothing was collected yet"
    harness.executor.open()
    harness.until(lambda: "r" in harness.said.finished)
    assert harness.said.answer("r") == reference(make_request(), 0)


def test_a_call_in_the_middle_of_a_step_is_run_and_told_at_once(harness: Harness) -> None:
    harness.loop.call(lambda engine: engine.add(make_request("busy"))).result(WAIT)
    assert harness.executor.submitted.acquire(timeout=WAIT)
    request = make_request("r", (4, 5, 6))

    def hand_over(engine: Engine) -> None:
        engine.reserve(request)
        engine.hand_off("r", [_first(request)])

    harness.loop.call(hand_over).result(WAIT)
    harness.until(lambda: ("r", 0) in harness.said.tokens)
    assert ("busy", 0) not in harness.said.tokens, "the step has not ended"


def _first(request: Request) -> Delta:
    return Delta(request_id=request.request_id, choice=0, tokens=reference(request, 0).tokens[:1])


def test_a_refused_request_fails_its_call_and_nothing_else(harness: Harness) -> None:
    harness.executor.open()
    bad = harness.loop.call(lambda engine: engine.add(make_request(max_tokens=0)))
    assert isinstance(bad.exception(WAIT), BadRequest)
    harness.loop.call(lambda engine: engine.add(make_request())).result(WAIT)
    harness.until(lambda: "r" in harness.said.finished)
    assert harness.fatal == []


def test_broken_ranks_are_told_once_and_every_later_call_fails(harness: Harness) -> None:
    harness.executor.error = ReplicaFailed("rank 1 died")
    harness.loop.call(lambda engine: engine.add(make_request())).result(WAIT)
    harness.executor.open()
    harness.until(lambda: harness.fatal)
    error = harness.loop.call(lambda engine: engine.books()).exception(WAIT)
    assert isinstance(error, Unavailable)
    assert "rank 1 died" in error.message
    assert harness.fatal == [harness.executor.error]


def test_what_broke_while_the_engine_was_idle_ends_the_loop_at_the_next_step(
    harness: Harness,
) -> None:
    harness.loop.call(lambda engine: engine.books()).result(WAIT)
    harness.executor.error = ReplicaFailed("rank 0 died")
    harness.executor.open()
    assert harness.loop.call(lambda engine: engine.books()).result(WAIT)
    harness.loop.call(lambda engine: engine.add(make_request())).result(WAIT)
    harness.until(lambda: harness.fatal == [harness.executor.error])


@pytest.mark.parametrize("harness", [{"ahead": True, "late": True}], indirect=True)
def test_what_had_come_out_before_the_ranks_broke_is_told(harness: Harness) -> None:
    executor, collect = harness.executor, harness.executor.inner.collect

    def last(timeout_s: float) -> StepResult:
        executor.error = ReplicaFailed("rank 0 died")
        return collect(timeout_s)

    executor.inner.collect = last  # type: ignore[method-assign]
    harness.loop.call(lambda engine: engine.add(make_request(max_tokens=50))).result(WAIT)
    for _ in range(2):
        assert executor.submitted.acquire(timeout=WAIT)
    executor.open()
    harness.until(lambda: harness.fatal)
    assert harness.said.tokens["r", 0] == list(reference(make_request(), 0).tokens[:1])


def test_ranks_that_break_while_they_have_nothing_to_do_end_the_loop(harness: Harness) -> None:
    harness.executor.failure = ReplicaFailed("rank 1 was killed by SIGKILL")
    harness.executor.wake()
    harness.until(lambda: harness.fatal == [harness.executor.failure])
    refused = harness.loop.call(len).exception(WAIT)
    assert isinstance(refused, Unavailable)
    assert "rank 1 was killed" in refused.message


def test_a_bug_in_a_call_fails_the_call_and_ends_the_loop(harness: Harness) -> None:
    future = harness.loop.call(lambda engine: engine.no_such_thing())
    assert isinstance(future.exception(WAIT), AttributeError)
    harness.until(lambda: harness.fatal)
    assert isinstance(harness.loop.call(len).exception(WAIT), Unavailable)


def test_calls_that_wait_behind_a_fatal_one_are_answered(harness: Harness) -> None:
    started, go = threading.Event(), threading.Event()

    def hold(_: Engine) -> None:
        started.set()
        assert go.wait(WAIT)
        raise RuntimeError("bug")

    first = harness.loop.call(hold)
    assert started.wait(WAIT)
    behind = [harness.loop.call(lambda engine: engine.books()) for _ in range(3)]
    go.set()
    assert isinstance(first.exception(WAIT), RuntimeError)
    assert all(isinstance(future.exception(WAIT), Unavailable) for future in behind)


def test_stop_ends_the_loop_after_the_step_in_flight(harness: Harness) -> None:
    harness.loop.call(lambda engine: engine.add(make_request())).result(WAIT)
    assert harness.executor.submitted.acquire(timeout=WAIT)
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        harness.loop.stop(0.01)
    harness.executor.open()
    harness.loop.stop(WAIT)
    assert harness.engine.in_flight == 0
    assert isinstance(harness.loop.call(lambda engine: 1).exception(WAIT), Unavailable)
    assert harness.fatal == []


def test_a_call_whose_future_was_cancelled_is_not_run(harness: Harness) -> None:
    started, go = threading.Event(), threading.Event()

    def hold(_: Engine) -> None:
        started.set()
        assert go.wait(WAIT)

    harness.loop.call(hold)
    assert started.wait(WAIT)
    ran: list[int] = []
    future = harness.loop.call(lambda _: ran.append(1))
    assert future.cancel()
    go.set()
    harness.loop.call(lambda _: None).result(WAIT)
    assert ran == []
