"""Redis: whether it answers, how fast, which version, and what time it has."""

from __future__ import annotations

import statistics
import time

import msgspec
import redis

from ekiden.doctor.preflight.check import Check, failure, ok, unseen, warning
from ekiden.registry.client import open_redis, shown

PINGS = 20
SLOW_S = 0.02
"""Of a ping, the median: members are read four times a second, so far below a poll."""
OLD = (6, 2)
"""What the scripts of the registry have been run on, at least."""
CLOCK_S = 1.0
"""Nothing compares clocks of two machines; logs are read side by side."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis told; times in seconds."""

    version: str
    ping_s: float
    clock_s: float
    """By how much its clock is ahead of ours."""


async def ask(url: str) -> Answer | str:
    """What it told, or why it did not."""
    client = open_redis(url)
    try:
        pings = []
        for _ in range(PINGS):
            began = time.perf_counter()
            await client.ping()
            pings.append(time.perf_counter() - began)
        info = await client.info("server")
        before = time.time()
        seconds, micros = await client.time()
        ours = (before + time.time()) / 2
    except (redis.RedisError, OSError, TimeoutError) as error:
        return str(error) or type(error).__name__
    finally:
        await client.aclose()
    return Answer(
        version=str(info["redis_version"]),
        ping_s=statistics.median(pings),
        clock_s=seconds + micros / 1e6 - ours,
    )


def checks(url: str, found: Answer | str) -> list[Check]:
    """``url`` without its password is what is shown."""
    if not url:
        return [unseen("Redis", "no URL", "--redis URL or REDIS_URL")]
    if isinstance(found, str):
        return [failure("Redis", f"{shown(url)}: {found}", "start one there, or another --redis")]
    return [_redis(url, found), _clock(found.clock_s)]


def _redis(url: str, found: Answer) -> Check:
    seen = f"{shown(url)}: version {found.version}, {1000 * found.ping_s:.2f} ms a ping"
    if _version(found.version) < OLD:
        return warning("Redis", seen, f"Redis {OLD[0]}.{OLD[1]} or newer, or Valkey")
    if found.ping_s > SLOW_S:
        return warning("Redis", seen, "a Redis that is nearer, or less busy")
    return ok("Redis", seen)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _clock(ahead: float) -> Check:
    seen = f"Redis is {abs(1000 * ahead):.0f} ms {'ahead' if ahead > 0 else 'behind'} of us"
    if abs(ahead) > CLOCK_S:
        return warning("clocks", seen, "NTP on both: logs of two machines are read side by side")
    return ok("clocks", seen)
