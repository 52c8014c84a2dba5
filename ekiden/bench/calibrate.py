"""Times of one running replica at points that tell the planner's constants apart.

A prompt alone tells what a token of a prompt costs, and a request; sequences decoded together tell
what a step costs, a sequence of it, and the KV that each reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ekiden.bench.config import BenchConfig, Load
from ekiden.bench.result import Level, Result
from ekiden.bench.sweep import Progress, run
from ekiden.bench.workload import Drawn, Shape
from ekiden.core.errors import SetupError
from ekiden.planner.fitting import Point

PROMPTS = (16, 64, 256, 512, 1024, 2048)
TOGETHER = (1, 2, 4, 8, 16)
BRIEF, LONG = 32, 1024
"""Tokens of prompts before what is decoded."""
OUTPUT = 48
REPEATS = 5
WAVES = 2
"""Of sequences that begin together."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for one point."""

    what: str
    shape: Shape
    together: int = 1

    @property
    def requests(self) -> int:
        return REPEATS if self.what == "ttft" else max(WAVES * self.together, REPEATS)

    def point(self, level: Level) -> Point:
        """The median of what ``level`` saw."""
        if self.what == "ttft":
            seconds = level.ttft_from_send_ms.p50 / 1000
            return Point(what="ttft", tokens=self.shape.prompt, seconds=seconds)
        return Point(
            what="itl",
            tokens=self.shape.prompt + self.shape.output // 2,
            sequences=self.together,
            # Not TPOT: that has the steps in which prompts of the same wave are computed as well.
            seconds=level.itl_ms.p50 / 1000,
        )


def looks(longest: int, most: int) -> Iterator[Look]:
    """``longest``: tokens of a prompt and its answer; ``most``: sequences together."""
    for tokens in PROMPTS:
        if tokens + 1 <= longest:
            yield Look(what="ttft", shape=Shape(tokens, 1))
    for together in TOGETHER:
        if together <= most:
            yield Look(what="itl", shape=Shape(BRIEF, OUTPUT), together=together)
    for together in TOGETHER[::2]:
        if together <= most and longest >= LONG + OUTPUT:
            yield Look(what="itl", shape=Shape(LONG, OUTPUT), together=together)


async def measure(
    base: BenchConfig, wanted: list[Look], progress: Progress, seen: Callable[[Point], None]
) -> list[Point]:
    """``base``: the server to ask; what it asks and how much is set here.

    Raises:
        SetupError: the server cannot be measured, a point had errors, or several replicas answered.
    """
    points = []
    for number, look in enumerate(wanted):
        level = await look_at(base, look, number)
        _check_one_replica(level)
        points.append(look.point(level))
        seen(points[-1])
        progress("calibrate", number + 1, len(wanted))
    return points


async def look_at(base: BenchConfig, look: Look, seed: int) -> Level:
    """What is seen at one point; ``seed`` of prompts that were not asked before. Raises as
    ``measure`` does."""
    workload = Drawn(shapes=(look.shape,), seed=seed, salt=base.workload_name)
    config = configured(base, workload, look.together)
    config = msgspec.structs.replace(config, count=look.requests, warmups=look.together)
    return _whole(await run(config, _quiet, _ignore), look)


def _check_one_replica(level: Level) -> None:
    """Constants are of one replica that does both, as far as a server tells who answered."""
    found = sorted({one.replica for one in level.service.replicas}) if level.service else []
    if len(found) > 1:
        raise SetupError(
            f"{' and '.join(found)} answered, and a calibration is of one replica that does both: "
            "start `ekiden up DIR --prefill 0 --decode 1`, or choose --two-pools"
        )


def configured(base: BenchConfig, workload: Drawn, together: int) -> BenchConfig:
    """``together`` requests at a time of ``workload``."""
    return msgspec.structs.replace(
        base,
        workload=workload,
        loads=(Load(kind="concurrency", value=together),),
        arrival="closed",
        duration_s=0.0,
    )


def _whole(result: Result, look: Look) -> Level:
    (level,) = result.levels
    if level.errors:
        kind, detail = next(iter(level.error_details.items()))
        raise SetupError(
            f"{level.requests - level.succeeded} of {level.requests} requests failed at prompts of "
            f"{look.shape.prompt} tokens, {look.together} together ({kind}: {detail}): lower "
            "--longest or --most"
        )
    return level


def _quiet(what: str, done: int, total: int) -> None:
    """A point is one step of the bar."""


def _ignore(result: Result) -> None:
    """Only the whole result counts."""
