"""Steps on their way, the start of a replica, and the mail of its ports: what executors share.

All of it is called from a rank's thread on one side and the driver's on the other. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Condition, Lock

from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.errors import DeadlineExceeded, EkidenError, InvariantBroken
from ekiden.engine.executor import PortListener
from ekiden.engine.plan import StepResult

log = logging.getLogger(__name__)

MAX_EARLY = 4096
"""Port messages kept for a listener that is still to come."""


def merge(results: Sequence[StepResult], tp: int) -> StepResult:
    """One result of a step from those of all ranks, in order of rank, ``tp`` of them a stage.

    Seconds are the slowest rank's, bytes those of all ranks together, ``idle_s`` the last
    stage's.
    """
    sampler = next((r for r in results if r.sampled), results[-1])
    return StepResult(
        step=sampler.step,
        sampled=sampler.sampled,
        compute_s=max(r.compute_s for r in results),
        collective_s=max(r.collective_s for r in results),
        collective_bytes=sum(r.collective_bytes for r in results),
        idle_s=results[-1].idle_s,
        stage_s=tuple(
            max(r.compute_s for r in results[first : first + tp])
            for first in range(0, len(results), tp)
        ),
    )


class InFlight:
    """Steps submitted and not yet collected, and the first cause of the replica's failure."""

    def __init__(self, ranks: int, limit: int, tp: int = 1, *, clock: Clock | None = None) -> None:
        """``ranks`` answer each step, ``tp`` of them a stage; ``limit`` steps at once."""
        self._clock = clock or MonotonicClock()
        self._oldest_since = 0.0
        self._ranks = ranks
        self._tp = tp
        self._limit = limit
        self._steps: dict[int, dict[int, StepResult]] = {}
        self._changed = Condition()
        self.failure: EkidenError | None = None

    def submit(self, step: int) -> None:
        """Note a step, before any rank hears of it.

        Raises:
            InvariantBroken: the limit is reached, or the step is in flight already.
            EkidenError: the cause of the replica's failure.
        """
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if step in self._steps or len(self._steps) >= self._limit:
                raise InvariantBroken(
                    f"step {step} was submitted while steps {list(self._steps)} were in flight: "
                    f"at most {self._limit}, each once"
                )
            if not self._steps:
                self._oldest_since = self._clock.now()
            self._steps[step] = {}

    def done(self, rank: int, result: StepResult) -> None:
        with self._changed:
            if result.step in self._steps:
                self._steps[result.step][rank] = result
                self._changed.notify_all()

    def fail(self, error: EkidenError) -> None:
        """The replica is lost. Only the first cause counts: the others follow from it."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def collect(self, timeout_s: float) -> StepResult:
        """The result of the oldest step, from every rank, as ``Executor.collect`` says."""
        with self._changed:
            if not self._steps:
                raise self.failure or InvariantBroken("no step is in flight to be collected")
            step, answers = next(iter(self._steps.items()))
            if not self._changed.wait_for(lambda: self._over(answers), timeout_s):
                raise self._late(step, answers, timeout_s)
            return self._take(step, answers)

    def poll(self, timeout_s: float) -> StepResult | None:
        """The same if it is there, as ``HostingExecutor.poll`` says; None if no step is over."""
        with self._changed:
            if not self._steps:
                return None
            step, answers = next(iter(self._steps.items()))
            if self._over(answers):
                return self._take(step, answers)
            if self._clock.now() - self._oldest_since > timeout_s:
                raise self._late(step, answers, timeout_s)
            return None

    def _over(self, answers: dict[int, StepResult]) -> bool:
        return len(answers) == self._ranks or self.failure is not None

    def _take(self, step: int, answers: dict[int, StepResult]) -> StepResult:
        if self.failure is not None and len(answers) < self._ranks:
            raise self.failure
        del self._steps[step]
        self._oldest_since = self._clock.now()
        return merge([answers[rank] for rank in range(self._ranks)], self._tp)

    def _late(
        self, step: int, answers: dict[int, StepResult], timeout_s: float
    ) -> DeadlineExceeded:
        silent = [rank for rank in range(self._ranks) if rank not in answers]
        return DeadlineExceeded(
            f"step {step} was not finished by ranks {silent} within {timeout_s:g} s",
            state=f"step {step}",
            peer=f"ranks {silent}",
        )


class Startup:
    """Waits until every rank is ready, and passes their progress on."""

    def __init__(self, ranks: int, clock: Clock) -> None:
        self._endpoints: list[bytes | None] = [None] * ranks
        self._loaded = [(0, 0)] * ranks
        self._failure: EkidenError | None = None
        self._changed = Condition()
        self._clock = clock

    def loading(self, rank: int, done: int, total: int) -> None:
        with self._changed:
            self._loaded[rank] = (done, total)
            self._changed.notify_all()

    def ready(self, rank: int, endpoint: bytes) -> None:
        with self._changed:
            self._endpoints[rank] = endpoint
            self._changed.notify_all()

    def fail(self, error: EkidenError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait(
        self, timeout_s: float, progress: Callable[[str, int, int], None] | None
    ) -> tuple[bytes, ...]:
        """The ranks' endpoints once all are ready.

        ``progress(what, done, total)`` hears of bytes of weights, all ranks together.

        Raises:
            EkidenError: the first cause for which one never will be.
            DeadlineExceeded: not within ``timeout_s``.
        """
        deadline = self._clock.now() + timeout_s
        told = (0, 0)
        while True:
            with self._changed:
                self._await_news(told, deadline - self._clock.now())
                endpoints = tuple(e for e in self._endpoints if e is not None)
                loaded, failure = self._total(), self._failure
            if failure is not None:
                raise failure
            if progress is not None and loaded != told:
                progress("loading weights", *loaded)
            told = loaded
            if len(endpoints) == len(self._endpoints):
                return endpoints
            if self._clock.now() >= deadline:
                raise self._late(timeout_s)

    def _total(self) -> tuple[int, int]:
        return sum(d for d, _ in self._loaded), sum(t for _, t in self._loaded)

    def _await_news(self, told: tuple[int, int], timeout_s: float) -> None:
        self._changed.wait_for(
            lambda: self._failure or None not in self._endpoints or self._total() != told,
            timeout_s,
        )

    def _late(self, timeout_s: float) -> DeadlineExceeded:
        late = [rank for rank, e in enumerate(self._endpoints) if e is None]
        done, total = self._total()
        return DeadlineExceeded(
            f"ranks {late} were not ready within {timeout_s:g} s; "
            f"{done} of {total} bytes of weights were read",
            state="starting",
            peer=f"ranks {late}",
        )


class PortMail:
    """What the ranks' ports emit, handed to one listener in order, one message at a time."""

    def __init__(self) -> None:
        self._listener: PortListener | None = None
        self._early: list[tuple[int, bytes]] = []
        self._lock = Lock()

    def listen(self, listener: PortListener) -> None:
        """Set the listener; it hears at once what came before it."""
        with self._lock:
            self._listener = listener
            for rank, message in self._early:
                self._hand_over(listener, rank, message)
            self._early.clear()

    def deliver(self, rank: int, message: bytes) -> None:
        """Raises InvariantBroken if MAX_EARLY messages wait for a listener already."""
        with self._lock:
            if self._listener is not None:
                self._hand_over(self._listener, rank, message)
            elif len(self._early) < MAX_EARLY:
                self._early.append((rank, message))
            else:
                raise InvariantBroken(f"nobody listens to the {MAX_EARLY} messages of KV ports")

    def _hand_over(self, listener: PortListener, rank: int, message: bytes) -> None:
        try:
            listener(rank, message)
        except Exception:
            log.exception("the listener of KV ports failed on a message of rank %d", rank)
