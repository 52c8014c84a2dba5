"""How much a prefill and a decode replica of one machine slow one another down.

Each is timed alone and beside the other at work, in turn, so that a machine that changes its pace
meanwhile changes both.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from ekiden.bench.calibrate import BRIEF, OUTPUT, Look, configured, look_at
from ekiden.bench.config import BenchConfig
from ekiden.bench.result import Result
from ekiden.bench.sweep import Progress, run
from ekiden.bench.workload import Drawn, Shape
from ekiden.planner.fitting import Point

ROUNDS = 3
PROMPT = 256
WRITING = (Shape(16, 120), Shape(16, 200))
"""Two at a time, which do not end together: somebody is decoding all the time."""
READING = (Shape(PROMPT, 1),)
FOR_EVER = 1 << 20
"""Requests; whoever waits for them is cancelled."""


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's time alone and beside the other at work; each is the median of the rounds."""

    alone: Point
    busy: Point

    @property
    def times(self) -> float:
        """How many times as long it takes; not less than as long."""
        return max(1.0, self.busy.seconds / self.alone.seconds)


async def measure(base: BenchConfig, progress: Progress) -> tuple[Beside, Beside]:
    """Of a prompt beside decoding, and of a decode step beside prompts.

    Raises:
        SetupError: the server cannot be measured, or a request failed.
    """
    prompt = Look(what="ttft", shape=Shape(PROMPT, 1))
    token = Look(what="itl", shape=Shape(BRIEF, OUTPUT))
    alone, busy = defaultdict[str, list[Point]](list), defaultdict[str, list[Point]](list)
    for number in range(ROUNDS):
        for look, shapes, together in ((prompt, WRITING, 2), (token, READING, 1)):
            salted = _salted(base, f"{number} {look.what}")
            alone[look.what].append(look.point(await look_at(salted, look, 0)))
            async with _busy(salted, shapes, together):
                busy[look.what].append(look.point(await look_at(salted, look, 1)))
        progress("calibrate", number + 1, ROUNDS)
    prompts, tokens = (
        Beside(alone=_median(alone[what]), busy=_median(busy[what])) for what in ("ttft", "itl")
    )
    return prompts, tokens


def _salted(base: BenchConfig, salt: str) -> BenchConfig:
    """With prompts that nobody has asked before."""
    return msgspec.structs.replace(base, workload_name=f"{base.workload_name} {salt}")


@asynccontextmanager
async def _busy(base: BenchConfig, shapes: tuple[Shape, ...], together: int) -> AsyncIterator[None]:
    """Somebody asks for ``shapes`` without a pause; begins when the first answer has come."""
    config = configured(base, Drawn(shapes=shapes, salt=f"{base.workload_name} busy"), together)
    begun = asyncio.Event()

    def heard(what: str, done: int, total: int) -> None:
        begun.set()

    endless = msgspec.structs.replace(config, count=FOR_EVER, warmups=0)
    load = asyncio.create_task(run(endless, heard, _ignore))
    waiting = asyncio.create_task(begun.wait())
    try:
        await asyncio.wait((load, waiting), return_when=asyncio.FIRST_COMPLETED)
        if load.done():
            load.result()  # it never ends by itself: this raises what it died of
        yield
    finally:
        for task in (waiting, load):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _median(points: list[Point]) -> Point:
    seconds = statistics.median(point.seconds for point in points)
    return msgspec.structs.replace(points[0], seconds=seconds)


def _ignore(result: Result) -> None:
    """It is cut off before there is one."""
