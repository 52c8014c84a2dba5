"""A worker process, seen from the bench: one line of JSON down, one line of JSON up.

The other side is ``serve.py``. Every wait has a deadline; what a worker prints goes to a log file,
whose end is shown when it fails.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER

SCRIPTS = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 900.0
"""A compiled peer takes minutes on a small machine."""
CALL_TIMEOUT_S = 600.0
END_TIMEOUT_S = 20.0
SHOWN_LOG_LINES = 15


class WorkerFailed(Exception):
    """A worker died, raised or did not answer in time; the message says which and why."""


class Worker:
    """Runs ``python -m benchmarks.MODULE ARGS``; ready when the constructor returns."""

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Raises WorkerFailed."""
        self.name = name
        self._log = FOLDER / "logs" / f"{name.replace(' ', '-')}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.{module}", *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}",
                    **(env or {}),
                },
                text=True,
            )
        self._answer(start_timeout_s)

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The worker's answer. Raises WorkerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("has ended") from None
        return self._answer(CALL_TIMEOUT_S)

    def close(self) -> None:
        """End it: its input closes; one that does not leave is killed."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        # One line is owed at a time, so nothing waits in Python's buffer when select is asked.
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            raise self._failed(f"did not answer within {timeout_s:.0f} s")
        if not (line := self._process.stdout.readline()):
            raise self._failed("has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, how: str) -> WorkerFailed:
        self.close()
        last = self._log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
        said = "\n".join(f"    {line}" for line in last)
        return WorkerFailed(f"{self.name} {how}; the end of {self._log}:\n{said}")
