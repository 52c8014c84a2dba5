"""The processes of the load: none hangs, none is left, and who died is said."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from scripted import GOOD, Scripted, serving, with_length

from ekiden.bench import worker
from ekiden.bench.crew import crew
from ekiden.bench.errand import Errand, Target
from ekiden.bench.record import Record
from ekiden.bench.workload import Drawn, Shape
from ekiden.core.errors import EkidenError, SetupError


def errand(url: str, **changes: object) -> Errand:
    fields = {
        "target": Target(url=url, model="m", timeout_s=60.0),
        "workload": Drawn(shapes=(Shape(3, 2),)),
        "first": 0,
        "step": 1,
        "start": time.monotonic(),
        "concurrency": 1,
        "count": 3,
    }
    return Errand(**{**fields, **changes})


def workers_left() -> list[int]:
    """Worker processes among the children of this one, ended or not."""
    tasks = Path("/proc/self/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [p for p in children if b"bench.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]


async def test_every_request_of_an_errand_is_heard_of_once():
    found: list[Record] = []
    async with serving(Scripted([with_length(GOOD)], stays=True)) as server, crew(1) as workers:
        (done,) = await workers.run([errand(server.url)], found.append, within_s=60)
    assert sorted(row.index for row in found) == [0, 1, 2]
    assert all(row.ok for row in found)
    assert done.gaps.count == 3
    assert workers_left() == []


async def test_a_worker_that_is_killed_is_said_and_the_others_do_not_stay():
    async with serving(Scripted([], stays=True)) as silent, crew(2) as workers:
        load = workers.run([errand(silent.url)] * 2, lambda _: None, within_s=60)
        running = asyncio.create_task(load)
        async with asyncio.timeout(60):
            await silent.asked.wait()
        os.kill(workers_left()[0], signal.SIGKILL)
        with pytest.raises(EkidenError, match="process of the load ended with exit code -9"):
            await running
    assert workers_left() == []


async def test_a_load_that_does_not_end_is_given_up_at_its_deadline():
    async with serving(Scripted([], stays=True)) as server, crew(1) as workers:
        with pytest.raises(EkidenError, match="not over within 1 s"):
            await workers.run([errand(server.url)], lambda _: None, within_s=1.0)
    assert workers_left() == []


async def test_an_errand_that_cannot_work_is_refused_with_its_reason():
    async with crew(1) as workers:
        with pytest.raises(SetupError, match="--base-url nowhere"):
            await workers.run([errand("nowhere")], lambda _: None, within_s=60)


async def test_a_worker_ends_when_its_parent_is_gone():
    pipe = asyncio.subprocess.PIPE
    argv = (sys.executable, "-m", "ekiden.bench.worker")
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    process.stdin.close()
    async with asyncio.timeout(60):
        assert await process.wait() == 0


def test_more_files_than_a_process_may_open_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker.resource, "getrlimit", lambda _: (100, 200))
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)
    worker.allow_files(136)
    with pytest.raises(SetupError, match=r"137 requests .*limit is 200: .*at most 136"):
        worker.allow_files(137)
