"""Real processes: what is started becomes ready, its death is told, and nothing is left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ekiden.core.clock import ManualClock
from ekiden.service.supervisor import ChildDied, ChildSpec, NotReady, Supervisor

OBEDIENT = "echo up; trap 'echo drained; exit 0' TERM; touch {ready}; sleep 60 & wait"
STUBBORN = "trap '' TERM; touch {ready}; sleep 60 & sleep 60; sleep 60"
TIMEOUT_S = 10.0

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks at /proc, and prctl is Linux's"
)


def spec(folder: Path, name: str, script: str, grace_s: float = 5.0) -> ChildSpec:
    ready = folder / f"{name}.ready"

    async def is_ready() -> bool:
        return ready.exists()

    argv = ("/bin/sh", "-c", script.format(ready=ready))
    return ChildSpec(name=name, argv=argv, ready=is_ready, grace_s=grace_s)


def group_is_gone(group: int) -> bool:
    """No process is left in the group, or only what waits to be reaped by init."""
    return not any(pgid == group and state != "Z" for state, pgid in processes())


def processes() -> Iterator[tuple[str, int]]:
    """(state, process group) of every process, as /proc tells them after the name."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            yield state, int(group)


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + TIMEOUT_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


async def started(supervisor: Supervisor, *specs: ChildSpec):
    children = await supervisor.start(specs)
    await supervisor.wait_ready(children, TIMEOUT_S, lambda child: None)
    return children


async def test_ready_children_are_reported_and_end_by_sigterm(tmp_path: Path):
    supervisor = Supervisor(tmp_path)
    children = await supervisor.start(
        [spec(tmp_path, "a", OBEDIENT), spec(tmp_path, "b", OBEDIENT)]
    )
    ready: list[str] = []
    await supervisor.wait_ready(children, TIMEOUT_S, lambda child: ready.append(child.spec.name))
    assert sorted(ready) == ["a", "b"]
    assert await supervisor.close(asyncio.Event()) == []
    assert [child.process.returncode for child in children] == [0, 0]
    assert (tmp_path / "a.log").read_text() == "up\ndrained\n"
    assert all(eventually(lambda pid=c.process.pid: group_is_gone(pid)) for c in children)


async def test_a_child_that_will_not_end_is_killed_with_all_it_spawned(tmp_path: Path):
    supervisor = Supervisor(tmp_path)
    (child,) = await started(supervisor, spec(tmp_path, "deaf", STUBBORN, grace_s=0.2))
    assert await supervisor.close(asyncio.Event()) == ["deaf"]
    assert child.process.returncode == -signal.SIGKILL
    assert eventually(lambda: group_is_gone(child.process.pid))


async def test_hurry_skips_the_grace(tmp_path: Path):
    supervisor = Supervisor(tmp_path)
    await started(supervisor, spec(tmp_path, "deaf", STUBBORN, grace_s=60.0))
    hurry = asyncio.Event()
    hurry.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert await supervisor.close(hurry) == ["deaf"]


async def test_what_a_dead_child_spawned_is_ended_too(tmp_path: Path):
    supervisor = Supervisor(tmp_path)
    (child,) = await started(supervisor, spec(tmp_path, "parent", "sleep 60 & touch {ready}; wait"))
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="parent ended: killed by SIGKILL"):
        async with asyncio.timeout(TIMEOUT_S):
            await supervisor.watch()
    assert not group_is_gone(child.process.pid)
    await supervisor.close(asyncio.Event())
    assert eventually(lambda: group_is_gone(child.process.pid))


async def test_death_before_ready_is_told_at_once_with_the_last_words(tmp_path: Path):
    supervisor = Supervisor(tmp_path)
    children = await supervisor.start([spec(tmp_path, "bad", "echo no such model; exit 2")])
    with pytest.raises(ChildDied, match="bad ended: exit code 2") as died:
        await supervisor.wait_ready(children, TIMEOUT_S, lambda child: None)
    assert died.value.child.tail() == "no such model"
    died.value.child.log.unlink()
    assert died.value.child.tail() == ""
    await supervisor.close(asyncio.Event())


async def test_the_deadline_names_who_was_not_ready(tmp_path: Path):
    clock = ManualClock()
    supervisor = Supervisor(tmp_path, clock=clock)
    slow = spec(tmp_path, "slow", "sleep 60")
    children = await supervisor.start([slow, spec(tmp_path, "fast", OBEDIENT)])

    def told(child: object) -> None:
        clock.advance(31.0)

    with pytest.raises(NotReady, match="not ready within 30 s: slow"):
        await supervisor.wait_ready(children, 30.0, told)
    await supervisor.close(asyncio.Event())


async def test_later_stages_end_before_earlier_ones(tmp_path: Path):
    order = tmp_path / "order"
    script = f"trap 'echo {{{{name}}}} >> {order}; exit 0' TERM; touch {{ready}}; sleep 60 & wait"
    supervisor = Supervisor(tmp_path)
    for name in ("redis", "workers", "gateway"):
        await started(supervisor, spec(tmp_path, name, script.replace("{{name}}", name)))
    await supervisor.close(asyncio.Event())
    assert order.read_text().split() == ["gateway", "workers", "redis"]


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path):
    program = f"""
import asyncio
from pathlib import Path
from ekiden.service.supervisor import ChildSpec, Supervisor

async def ready():
    return Path("{tmp_path}/c.ready").exists()

async def main():
    supervisor = Supervisor(Path("{tmp_path}"))
    script = {OBEDIENT.format(ready=tmp_path / "c.ready")!r}
    spec = ChildSpec(name="c", argv=("/bin/sh", "-c", script), ready=ready, grace_s=5)
    children = await supervisor.start([spec])
    await supervisor.wait_ready(children, 10, lambda child: None)
    print(children[0].process.pid, flush=True)
    await supervisor.watch()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        parent.kill()
    assert eventually(lambda: "drained" in (tmp_path / "c.log").read_text())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)  # the shell's own sleep
