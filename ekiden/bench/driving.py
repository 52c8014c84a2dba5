"""The two ways to load a server: by a schedule, or by so many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from ekiden.bench.asking import Asker, Due
from ekiden.bench.record import Record
from ekiden.bench.workload import Ask
from ekiden.core.clock import Clock

Emit = Callable[[Record], None]


async def open_loop(
    asker: Asker,
    asks: Iterator[Ask],
    moments: Sequence[float],
    emit: Emit,
    *,
    clock: Clock,
    max_in_flight: int,
) -> None:
    """Send each request at its moment, whether or not earlier ones have been answered.

    A request is made ready before its moment. Who is late says so in its record: the schedule does
    not wait, and a time counts from the moment at which its request was due.
    """
    room = asyncio.Semaphore(max_in_flight)

    async def send(due: Due) -> None:
        try:
            emit(await asker.ask(due))
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for at in moments:
            due = asker.due(next(asks), at)
            await _until(at, clock)
            await room.acquire()
            group.create_task(send(due))


async def closed_loop(
    asker: Asker,
    asks: Iterator[Ask],
    emit: Emit,
    *,
    clock: Clock,
    concurrency: int,
    start: float,
    end: float,
) -> None:
    """``concurrency`` askers, each of which sends its next request when its last was answered.

    Ends with ``asks``; none is sent after ``end``.
    """

    async def one() -> None:
        await _until(start, clock)
        for ask in asks:
            if clock.now() >= end:
                return
            due = asker.due(ask, 0.0)
            emit(await asker.ask(due._replace(at=clock.now())))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one())


async def _until(moment: float, clock: Clock) -> None:
    while (left := moment - clock.now()) > 0:
        await asyncio.sleep(left)
