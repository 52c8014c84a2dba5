"""A process that sends requests: errands come in by stdin, records go out by stdout.

It ends when stdin ends, so none outlives the parent.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from ekiden.bench.asking import Asker
from ekiden.bench.driving import closed_loop, open_loop
from ekiden.bench.errand import Answer, Errand, Failed, Finished
from ekiden.bench.http import Address, Server
from ekiden.bench.workload import Ask
from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.errors import EkidenError, SetupError

_SPARE_FILES = 64

Say = Callable[[Answer], None]


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for line in sys.stdin.buffer:
        try:
            _run(run_errand(msgspec.json.decode(line, type=Errand), _say, MonotonicClock()))
        except EkidenError as error:
            _say(Failed(why=error.message))
        except BrokenPipeError:
            return 1
    return 0


async def run_errand(errand: Errand, say: Say, clock: Clock) -> None:
    """Send the errand's requests, say a record of each, and at last ``Finished``.

    Raises:
        SetupError: more requests may be in flight than files may be open.
    """
    allow_files(errand.concurrency or errand.max_in_flight)
    target = errand.target
    server = Server(Address(target.url), api_key=target.api_key, clock=clock)
    asker = Asker(
        server,
        target.dialect,
        model=target.model,
        wording=target.wording,
        timeout_s=target.timeout_s,
        clock=clock,
        began=errand.start,
    )
    cpu, began = time.process_time(), clock.now()
    try:
        await _drive(errand, asker, say, clock)
    finally:
        await server.close()
    passed = max(clock.now() - began, 1e-9)
    say(Finished(gaps=asker.gaps, cpu_share=(time.process_time() - cpu) / passed))


async def _drive(errand: Errand, asker: Asker, say: Say, clock: Clock) -> None:
    if not errand.concurrency:
        moments = [errand.start + moment for moment in errand.moments]
        limit = errand.max_in_flight
        await open_loop(asker, _asks(errand), moments, say, clock=clock, max_in_flight=limit)
        return
    await closed_loop(
        asker,
        itertools.islice(_asks(errand), errand.count or None),
        say,
        clock=clock,
        concurrency=errand.concurrency,
        start=errand.start,
        end=errand.start + errand.duration_s if errand.duration_s else math.inf,
    )


def _asks(errand: Errand) -> Iterator[Ask]:
    return map(errand.workload.ask, range(errand.first, errand.workload.size, errand.step))


def allow_files(connections: int) -> None:
    """Raise the soft limit on open files to what is needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _SPARE_FILES
    if needed > hard:
        raise SetupError(
            f"{connections} requests in flight in one process need {needed} open files, and the "
            f"limit is {hard}: use more --processes, or at most {hard - _SPARE_FILES}"
        )
    if needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _run(work: object) -> None:
    """On uvloop where there is one: half the time of a request is the loop's."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)  # type: ignore[arg-type]
    else:
        uvloop.run(work)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
