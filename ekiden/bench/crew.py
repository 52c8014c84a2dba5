"""The parent's side of the workers: start them, send them out, hear what they did."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from ekiden.bench.errand import MAX_LINE, Answer, Errand, Failed, Finished
from ekiden.bench.record import Record
from ekiden.core.errors import EkidenError, SetupError

_DECODER = msgspec.json.Decoder(Answer)


class Crew:
    """Workers that wait for errands."""

    def __init__(self, workers: list[asyncio.subprocess.Process]) -> None:
        self._workers = workers

    @property
    def size(self) -> int:
        return len(self._workers)

    async def run(
        self, errands: Sequence[Errand], heard: Callable[[Record], None], *, within_s: float
    ) -> list[Finished]:
        """Send an errand to each worker and hear every record; returns when all are done.

        Raises:
            SetupError: a worker's errand cannot work.
            EkidenError: a worker ended, or was not done ``within_s``.
        """
        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_errand(worker, errand, heard))
                    for worker, errand in zip(self._workers, errands, strict=True)
                ]
        except TimeoutError:
            raise EkidenError(f"the load was not over within {within_s:.0f} s") from None
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        return [task.result() for task in tasks]


@asynccontextmanager
async def crew(size: int) -> AsyncIterator[Crew]:
    """``size`` workers, gone when the block is left."""
    workers = [await _start() for _ in range(size)]
    try:
        yield Crew(workers)
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
        await asyncio.gather(*(worker.wait() for worker in workers))


async def _start() -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    argv = (sys.executable, "-m", "ekiden.bench.worker")
    return await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, limit=MAX_LINE)


async def _errand(
    worker: asyncio.subprocess.Process, errand: Errand, heard: Callable[[Record], None]
) -> Finished:
    writer, reader = worker.stdin, worker.stdout
    assert writer is not None  # both are pipes
    assert reader is not None
    try:
        writer.write(msgspec.json.encode(errand) + b"\n")
        await writer.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the end of its output says the same, below
    while line := await reader.readline():
        answer = _DECODER.decode(line)
        if isinstance(answer, Record):
            heard(answer)
        elif isinstance(answer, Failed):
            raise SetupError(answer.why)
        else:
            return answer
    raise EkidenError(f"a process of the load ended with exit code {await worker.wait()}")
