"""Starts child processes, watches them, and leaves none behind.

Every child leads a process group of its own, so that what it spawned can be ended with it and
Ctrl-C on the terminal reaches the supervisor alone. Should the supervisor itself be killed, the
kernel sends each child SIGTERM (Linux), which drains it.

Ending goes in stages, last stage first: SIGTERM, a grace, then SIGKILL to the whole group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from ekiden.core.clock import Clock, MonotonicClock

POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to run."""

    name: str
    argv: tuple[str, ...]
    ready: Callable[[], Awaitable[bool]]
    """Asked every ``POLL_S`` until it says yes."""
    grace_s: float
    """From SIGTERM to SIGKILL."""
    note: str = ""
    """Shown beside the name once it is ready."""


class ChildDied(Exception):
    """A child ended that nobody told to end."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.spec.name} ended: {child.cause()}")
        self.child = child


class NotReady(Exception):
    """The deadline passed; ``children`` are those that were not ready."""

    def __init__(self, children: list[Child], timeout_s: float) -> None:
        names = ", ".join(child.spec.name for child in children)
        super().__init__(f"not ready within {timeout_s:.0f} s: {names}")
        self.children = children


class Child:
    """A running process and its log."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.ready_after_s: float | None = None
        self.process = process
        self.ended = asyncio.ensure_future(process.wait())

    def cause(self) -> str:
        code = self.process.returncode
        if code is None:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def tail(self, lines: int = 15) -> str:
        """The last of its log; empty if somebody has moved it away."""
        try:
            text = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(text[-lines:])

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Supervisor:
    """The children of one run. Used from one event loop."""

    def __init__(self, run_dir: Path, *, clock: Clock | None = None) -> None:
        self.run_dir = run_dir
        self._clock = clock or MonotonicClock()
        self._stages: list[list[Child]] = []

    @property
    def children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    async def start(self, specs: Sequence[ChildSpec]) -> list[Child]:
        """Start one stage. A stage is ended before the stages that were started earlier."""
        stage: list[Child] = []
        self._stages.append(stage)
        for spec in specs:
            stage.append(await self._spawn(spec))
        return stage

    async def _spawn(self, spec: ChildSpec) -> Child:
        log = self.run_dir / f"{spec.name}.log"
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        return Child(spec, process, log)

    async def wait_ready(
        self,
        children: Sequence[Child],
        timeout_s: float,
        report: Callable[[Child], None],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Until all are ready. Raises ChildDied at once, NotReady after ``timeout_s``.

        ``report`` is told of each that becomes ready; ``tick`` is called between the looks.
        """
        start = self._clock.now()
        waiting = list(children)
        while waiting:
            self.check()
            for child in [child for child in waiting if await child.spec.ready()]:
                child.ready_after_s = self._clock.now() - start
                waiting.remove(child)
                report(child)
            if waiting and self._clock.now() - start > timeout_s:
                raise NotReady(waiting, timeout_s)
            tick()
            await asyncio.sleep(POLL_S if waiting else 0)

    def check(self) -> None:
        """Raise ChildDied if a child has ended."""
        for child in self.children:
            if child.ended.done():
                raise ChildDied(child)

    async def watch(self) -> None:
        """Return never: raise ChildDied when a child ends."""
        await asyncio.wait(
            [child.ended for child in self.children], return_when=asyncio.FIRST_COMPLETED
        )
        self.check()

    async def close(self, hurry: asyncio.Event) -> list[str]:
        """End everything; with ``hurry`` set, without grace. Names those that had to be killed."""
        killed: list[str] = []
        while self._stages:
            stage = self._stages.pop()
            ended = await asyncio.gather(*(_end(child, hurry) for child in stage))
            killed += [name for name in ended if name]
        return killed


async def _end(child: Child, hurry: asyncio.Event) -> str:
    """The child's name if it had to be killed, else nothing."""
    try:
        if not child.ended.done():
            child.process.terminate()
            await _wait(child, hurry)
    finally:
        stubborn = not child.ended.done()
        child.signal_group(signal.SIGKILL)  # also what an ended child left in its group
        await child.ended
    return child.spec.name if stubborn else ""


async def _wait(child: Child, hurry: asyncio.Event) -> None:
    hurried = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait(
            {child.ended, hurried},
            timeout=child.spec.grace_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
    finally:
        hurried.cancel()


def _die_with(parent: int) -> Callable[[], None] | None:
    """What a child runs before exec: ask the kernel for SIGTERM when the parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after a fork nothing may be loaded

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died between the fork and this line
            os._exit(1)

    return arrange
