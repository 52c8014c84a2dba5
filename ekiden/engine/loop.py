"""Runs an engine on the thread that hears its ranks.

One thread, and it never waits for a model step: it takes in what the ranks have done, tells it,
sends the next plans and sleeps until something comes. So a call (a cancel, a reservation, a
hand-off token) is run at once, even in the middle of a long step, and what comes out of it is told
at once. A thread of the engine's own, and one that waited for steps, cost three wake-ups a step.
"""

from __future__ import annotations

import threading
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
from ekiden.engine.executor import HostingExecutor

T = TypeVar("T")

MAX_CALLS = 65_536
"""Calls waiting for the engine's thread. It takes them at once, so more means it is stuck."""


class EngineLoop:
    """Owns an engine. ``call`` from any thread; ``on_output`` and ``on_fatal`` run on its own."""

    def __init__(
        self,
        engine: Engine,
        executor: HostingExecutor,
        on_output: Callable[[EngineOutput], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``executor`` is the engine's own. ``on_output`` gets every output that is not empty, in
        order; ``on_fatal`` is called once when the engine or its ranks broke, after which every
        call fails.
        """
        self._engine = engine
        self._executor = executor
        self._on_output = on_output
        self._on_fatal = on_fatal
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._refusal: EkidenError | None = None
        self._stopping = False
        self._started = False
        self._over = threading.Event()
        self._thread: int | None = None

    def start(self) -> None:
        self._started = True
        self._executor.host(self._turn)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run ``function(engine)`` on the engine's thread. What it tells is told right after it.

        The future fails with what the function raised; with Unavailable once the loop has ended;
        with Overloaded if too many calls wait. An error that is not an ordinary EkidenError means
        the engine can no longer be trusted, and ends the loop.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._refusal is not None:
                future.set_exception(self._refusal)
                return future
            if len(self._calls) >= MAX_CALLS:
                future.set_exception(Overloaded(f"{MAX_CALLS} calls wait for the engine"))
                return future
            self._calls.append((function, future))
        self._executor.wake()
        return future

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the steps in flight; what is unfinished stays unfinished. May be repeated.

        Raises:
            DeadlineExceeded: a step is still running after ``timeout_s``.
        """
        self._stopping = True
        self._executor.wake()
        if not self._started or threading.get_ident() == self._thread:
            return
        if not self._over.wait(timeout_s):
            raise DeadlineExceeded(
                f"the engine did not stop within {timeout_s:g} s: a step is still running",
                state="stopping",
                peer="ranks",
            )

    # From here on: called on the engine's thread.

    def _turn(self) -> None:
        """Do all that can be done now, unless the loop has ended."""
        if self._over.is_set():
            return
        self._thread = threading.get_ident()
        try:
            if not self._go_on():
                self._end(None)
        except BaseException as error:
            self._end(error)

    def _go_on(self) -> bool:
        """Take in everything that came, tell what came out, start steps; False: time to end."""
        failure = self._apply_results()
        self._answer_all()
        self._tell()
        if failure is not None:
            raise failure
        if self._stopping:
            return self._engine.in_flight > 0
        while (plan := self._engine.next_plan()) is not None:
            self._executor.submit(plan)
        self._tell()
        return True

    def _apply_results(self) -> EkidenError | None:
        """Take in the steps that are over. How the ranks failed, if they did."""
        limit_s = self._engine.config.step_timeout_s
        while self._engine.in_flight:
            try:
                result = self._executor.poll(limit_s)
            except EkidenError as failure:
                return failure
            if result is None:
                break
            self._engine.apply(result)
        return self._executor.failure  # of a rank that ended while it had nothing to do

    def _tell(self) -> None:
        if output := self._engine.take_output():
            self._on_output(output)

    def _answer_all(self) -> None:
        """Run the calls that wait now; later ones wake the thread for another turn."""
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
        with self._lock:
            self._refusal = Unavailable(reason)
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._refusal)
        self._over.set()
        if failure is not None:
            self._on_fatal(failure)
