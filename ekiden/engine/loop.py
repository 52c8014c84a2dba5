"""The thread that runs an engine, and the one that waits for its ranks.

The engine's thread never waits for a model step: it submits plans, a second thread collects them,
and results come back as they end. So a call (a cancel, a
reservation, a hand-off token) is run at once, even in the middle of a long step, and what comes out
of it is told at once. With nothing to do both threads sleep.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ekiden.core.errors import (
    DeadlineExceeded,
    EkidenError,
    InvariantBroken,
    Overloaded,
    Unavailable,
)
from ekiden.engine.engine import Engine, EngineOutput
from ekiden.engine.executor import Executor
from ekiden.engine.plan import StepPlan, StepResult

T = TypeVar("T")

MAX_CALLS = 65_536
"""Calls waiting for the engine's thread. It takes them at once, so more means it is stuck."""


class _Steps:
    """Waits for the steps that were submitted, in order, on a thread of its own."""

    def __init__(
        self,
        executor: Executor,
        timeout_s: float,
        on_result: Callable[[StepResult], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._executor = executor
        self._timeout_s = timeout_s
        self._on_result = on_result
        self._on_error = on_error
        # The engine keeps at most max_in_flight steps about; one more place for the end mark.
        self._due: queue.Queue[bool] = queue.Queue(executor.max_in_flight + 1)
        self.thread = threading.Thread(target=self._run, name="ekiden-steps", daemon=True)

    def submit(self, plan: StepPlan) -> None:
        """Hand the plan to the ranks at once: one planned ahead must be there when they want it."""
        self._executor.submit(plan)
        self._due.put_nowait(True)

    def end(self) -> None:
        self._due.put_nowait(False)

    def _run(self) -> None:
        try:
            while self._due.get():
                self._on_result(self._executor.collect(self._timeout_s))
        except BaseException as error:
            self._on_error(error)


class EngineLoop:
    """Owns an engine. ``call`` from any thread; ``on_output`` and ``on_fatal`` run on its own."""

    def __init__(
        self,
        engine: Engine,
        on_output: Callable[[EngineOutput], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``on_output`` gets every output that is not empty, in order; ``on_fatal`` is called once
        when the engine or its ranks broke, after which every call fails.
        """
        self._engine = engine
        self._on_output = on_output
        self._on_fatal = on_fatal
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._results: deque[StepResult] = deque()
        self._failure: BaseException | None = None
        self._ended: EkidenError | None = None
        self._stopping = False
        self._steps = _Steps(
            engine.executor, engine.config.step_timeout_s, self._heard, self._failed
        )
        self._thread = threading.Thread(target=self._run, name="ekiden-engine", daemon=True)

    def start(self) -> None:
        self._steps.thread.start()
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run ``function(engine)`` on the engine's thread. What it tells is told right after it.

        The future fails with what the function raised; with Unavailable once the loop has ended;
        with Overloaded if too many calls wait. An error that is not an ordinary EkidenError means
        the engine can no longer be trusted, and ends the loop.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._ended is not None:
                future.set_exception(self._ended)
            elif len(self._calls) >= MAX_CALLS:
                future.set_exception(Overloaded(f"{MAX_CALLS} calls wait for the engine"))
            else:
                self._calls.append((function, future))
                self._changed.notify()
        return future

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the steps in flight; what is unfinished stays unfinished. May be repeated.

        Raises:
            DeadlineExceeded: a thread has not ended within ``timeout_s``.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if threading.current_thread() is self._thread or not self._thread.ident:
            return
        end = time.monotonic() + timeout_s
        for thread in (self._thread, self._steps.thread):
            thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive() or self._steps.thread.is_alive():
            raise DeadlineExceeded(
                f"the engine did not stop within {timeout_s:g} s: a step is still running",
                state="stopping",
                peer="ranks",
            )

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._turn():
                pass
        except BaseException as error:
            failure = error
        self._end(failure)

    def _turn(self) -> bool:
        """Take in everything that came, tell what came out, start steps; False: time to end."""
        with self._changed:
            self._changed.wait_for(self._has_news)
            results, self._results = self._results, deque()
            failure, stopping = self._failure, self._stopping
        for result in results:
            self._engine.apply(result)
        self._answer_all()
        self._tell()
        if failure is not None:
            raise failure
        if stopping:
            return self._engine.in_flight > 0
        while (plan := self._engine.next_plan()) is not None:
            self._steps.submit(plan)
        self._tell()
        return True

    def _has_news(self) -> bool:
        ready = self._calls or self._results or self._failure is not None
        return bool(ready or (self._stopping and not self._engine.in_flight))

    def _tell(self) -> None:
        if output := self._engine.take_output():
            self._on_output(output)

    def _answer_all(self) -> None:
        """Run the calls that wait now; later ones wait for the next turn, so steps go on."""
        for _ in range(len(self._calls)):
            self._answer(*self._calls.popleft())

    def _answer(self, function: Callable[[Engine], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(self._engine)
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, EkidenError) or isinstance(error, InvariantBroken):
                raise
        else:
            future.set_result(result)

    def _end(self, failure: BaseException | None) -> None:
        """Answer every call that still waits, and all later ones, with the reason."""
        reason = f"the engine has failed: {failure}" if failure else "the engine has stopped"
        with self._changed:
            self._ended = Unavailable(reason)
            calls, self._calls = self._calls, deque()
        self._steps.end()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._ended)
        if failure is not None:
            self._on_fatal(failure)

    def _heard(self, result: StepResult) -> None:
        with self._changed:
            self._results.append(result)
            self._changed.notify()

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify()
