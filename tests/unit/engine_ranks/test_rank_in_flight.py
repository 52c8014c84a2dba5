"""The books of submitted steps, of a replica's start, and of its ports' mail."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from ekiden.core.clock import ManualClock, MonotonicClock
from ekiden.core.errors import (
    DeadlineExceeded,
    EkidenError,
    InvariantBroken,
    ReplicaFailed,
    SetupError,
)
from ekiden.engine.in_flight import MAX_EARLY, InFlight, PortMail, Startup
from ekiden.engine.plan import Sampled, StepResult


def result(step: int, *, token: int | None = None, seconds: float = 0.0) -> StepResult:
    sampled = () if token is None else (Sampled(1, 0, token),)
    return StepResult(step, sampled, seconds, seconds / 2, 100, seconds / 4)


def test_a_step_is_over_when_every_rank_has_answered_and_the_oldest_comes_first() -> None:
    books = InFlight(ranks=2, limit=2)
    books.submit(10)
    books.submit(11)
    books.done(0, result(11, token=9))
    books.done(1, result(11))
    books.done(1, result(10, seconds=4.0))
    with pytest.raises(DeadlineExceeded, match=r"step 10 was not finished by ranks \[0\]"):
        books.collect(0.01)
    books.done(0, result(10, token=5, seconds=2.0))
    merged = books.collect(1.0)
    assert merged == StepResult(10, (Sampled(1, 0, 5),), 4.0, 2.0, 200, 1.0, (2.0, 4.0))
    assert books.collect(1.0).sampled[0].token == 9


def test_a_stage_took_as_long_as_its_slowest_rank() -> None:
    books = InFlight(ranks=4, limit=1, tp=2)
    books.submit(1)
    for rank, seconds in enumerate((1.0, 3.0, 2.0, 0.5)):
        books.done(rank, result(1, seconds=seconds))
    assert books.collect(1.0).stage_s == (3.0, 2.0)


def test_no_more_steps_than_the_limit_and_none_twice() -> None:
    books = InFlight(ranks=1, limit=2)
    books.submit(1)
    with pytest.raises(InvariantBroken, match="step 1"):
        books.submit(1)
    books.submit(2)
    with pytest.raises(InvariantBroken, match="at most 2"):
        books.submit(3)
    books.done(0, result(1))
    books.collect(1.0)
    books.submit(3)


def test_nothing_in_flight_cannot_be_collected() -> None:
    with pytest.raises(InvariantBroken, match="no step"):
        InFlight(ranks=1, limit=1).collect(1.0)


def test_the_first_cause_is_raised_at_once_and_from_then_on() -> None:
    books = InFlight(ranks=2, limit=2)
    books.submit(1)
    waiting = Event()

    def fail() -> None:
        waiting.wait(5.0)
        books.fail(ReplicaFailed("rank 1 was killed by SIGKILL"))
        books.fail(ReplicaFailed("rank 0 waited for rank 1"))

    thread = Thread(target=fail)
    thread.start()
    waiting.set()
    for _ in range(2):
        with pytest.raises(ReplicaFailed, match="SIGKILL"):
            books.collect(60.0)
    with pytest.raises(ReplicaFailed, match="SIGKILL"):
        books.submit(2)
    thread.join()


def test_a_step_that_every_rank_finished_outlives_the_failure_after_it() -> None:
    books = InFlight(ranks=1, limit=2)
    books.submit(1)
    books.submit(2)
    books.done(0, result(1, token=3))
    books.fail(ReplicaFailed("gone"))
    assert books.collect(1.0).sampled[0].token == 3
    with pytest.raises(ReplicaFailed, match="gone"):
        books.collect(1.0)


def test_polling_takes_each_step_once_in_order_and_never_waits() -> None:
    books = InFlight(ranks=2, limit=2)
    assert books.poll(0.0) is None, "nothing was submitted"
    books.submit(1)
    books.submit(2)
    for rank in range(2):
        books.done(rank, result(2, token=4))
    assert books.poll(60.0) is None, "step 1 goes first"
    books.done(0, result(1, token=3))
    assert books.poll(60.0) is None, "one rank has not answered"
    books.done(1, result(1, token=3))
    taken = [books.poll(60.0) for _ in range(3)]
    assert [r and r.step for r in taken] == [1, 2, None]


def test_polling_names_the_silent_ranks_once_the_oldest_step_is_overdue() -> None:
    clock = ManualClock(100.0)
    books = InFlight(ranks=2, limit=2, clock=clock)
    books.submit(1)
    clock.advance(4.0)
    books.submit(2)
    clock.advance(5.0)
    assert books.poll(9.0) is None
    for rank in range(2):
        books.done(rank, result(1, token=3))
    assert books.poll(9.0)
    books.done(0, result(2, token=3))
    clock.advance(9.0)
    assert books.poll(9.0) is None, "step 2 is waited for since step 1 was taken"
    clock.advance(0.5)
    with pytest.raises(DeadlineExceeded, match=r"step 2 .* ranks \[1\] within 9 s"):
        books.poll(9.0)


def test_polling_raises_the_failure_of_a_step_that_will_never_end() -> None:
    books = InFlight(ranks=1, limit=2)
    books.submit(1)
    books.submit(2)
    books.done(0, result(1, token=3))
    books.fail(ReplicaFailed("gone"))
    first = books.poll(60.0)
    assert first is not None
    assert first.step == 1
    with pytest.raises(ReplicaFailed, match="gone"):
        books.poll(60.0)


def test_start_gives_the_endpoints_in_order_and_tells_of_progress() -> None:
    startup = Startup(2, MonotonicClock())
    told: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        told.append((what, done, total))
        startup.ready(1, b"b")
        startup.ready(0, b"a")

    startup.loading(0, 5, 10)
    startup.loading(1, 7, 20)
    assert startup.wait(5.0, progress) == (b"a", b"b")
    assert told == [("loading weights", 12, 30)]


def test_a_start_that_fails_raises_the_very_error() -> None:
    startup = Startup(2, MonotonicClock())
    error = SetupError("shard 2 is missing")
    startup.fail(error)
    startup.fail(ReplicaFailed("rank 0 waited"))
    with pytest.raises(EkidenError) as caught:
        startup.wait(5.0, None)
    assert caught.value is error


def test_a_start_that_never_ends_names_the_ranks_it_waits_for() -> None:
    startup = Startup(3, MonotonicClock())
    startup.ready(1, b"")
    startup.loading(2, 3, 9)
    with pytest.raises(DeadlineExceeded, match=r"ranks \[0, 2\].*3 of 9 bytes"):
        startup.wait(0.01, None)


def test_mail_waits_for_its_listener_and_keeps_its_order() -> None:
    mail, heard = PortMail(), list[tuple[int, bytes]]()
    mail.deliver(0, b"first")
    mail.listen(lambda rank, message: heard.append((rank, message)))
    mail.deliver(1, b"second")
    assert heard == [(0, b"first"), (1, b"second")]


def test_mail_without_a_listener_is_bounded() -> None:
    mail = PortMail()
    for _ in range(MAX_EARLY):
        mail.deliver(0, b"")
    with pytest.raises(InvariantBroken, match="nobody listens"):
        mail.deliver(0, b"")


def test_a_listener_that_raises_loses_its_message_only(caplog: pytest.LogCaptureFixture) -> None:
    mail, heard = PortMail(), list[bytes]()

    def listen(rank: int, message: bytes) -> None:
        if message == b"bad":
            raise RuntimeError("no loop")
        heard.append(message)

    mail.listen(listen)
    for message in (b"bad", b"good"):
        mail.deliver(2, message)
    assert heard == [b"good"]
    assert "rank 2" in caplog.text
