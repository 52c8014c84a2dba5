"""What ``ekiden up`` says: progress, one banner, and why it ended."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ekiden.cli.deployment import Deployment
from ekiden.cli.output import leave_output
from ekiden.core import env
from ekiden.service.supervisor import Child, ChildDied, NotReady

_QUESTION = "What is a relay race?"
QUIET_S = 10.0
"""How long nothing is said where there is no terminal."""
_START_LINES = 200
"""Of a service's log that are looked through once it is ready."""
_SLOWER = re.compile(r"kernels of \S+ are (plain torch's, not \w+: .+)$", re.MULTILINE)
_WIRE = re.compile(
    r"(KV from \S+ takes .+|KV from \S+: .+|KV wires from .+|KV wire \S+ is left out: .+|"
    r"prefill replica \S+: .+)$",
    re.MULTILINE,
)
_PERCENT = re.compile(r"(\S+): (\d+)%\s*$")


def say(text: str) -> None:
    """Print, unless whoever read our output has left: services are ended in order all the same."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave_output()


def ready_line(child: Child) -> str:
    return f"  {child.spec.name:<10} ready in {child.ready_after_s or 0:5.1f} s  {child.spec.note}"


class Waiting:
    """Lines for those that are ready, and for those that are not: one that moves on a terminal,
    and one now and then elsewhere."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._waiting = list(children)
        self._tty = sys.stdout.isatty()
        self._began = self._said_at = time.monotonic()

    def __enter__(self) -> Waiting:
        say(f"starting {', '.join(child.spec.name for child in self._waiting)}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._wipe()

    def ready(self, child: Child) -> None:
        self._waiting.remove(child)
        self._wipe()
        say(ready_line(child))
        for what in slower(child.tail(_START_LINES)):
            say(f"  {'':<10} kernels are {what}")

    def tick(self) -> None:
        now = time.monotonic()
        if not self._waiting or not (self._tty or now >= self._said_at + QUIET_S):
            return
        self._said_at = now
        names = ", ".join(at_work(child.spec.name, child.tail(1)) for child in self._waiting)
        line = f"  … {now - self._began:.0f} s: {names}"[:78]
        if self._tty:
            self._wipe()
            print(line, end="", flush=True)
        else:
            say(line)

    def _wipe(self) -> None:
        if self._tty:
            print("\r\033[K", end="", flush=True)


def at_work(name: str, said: str) -> str:
    """The name of a service, and what ``said``, the last line of its log, tells of its start."""
    if match := _PERCENT.search(said):
        return f"{name} ({match[1]} {match[2]}%)"
    return f"{name} (compiling kernels)" if "compiling kernels" in said else name


def slower(said: str) -> list[str]:
    """What a service computes with, and why, where it could not have better; once for all ranks."""
    return list(dict.fromkeys(_SLOWER.findall(said)))


def wires(said: str) -> list[str]:
    """What a decode service said of the prefill replicas that it met: the wire, or why none."""
    return list(dict.fromkeys(_WIRE.findall(said)))


def killed(name: str, *, asked: bool) -> str:
    """``asked``: by a second Ctrl-C; else it had its time and did not end."""
    return f"{name} was killed" if asked else f"{name} did not end in time and was killed"


def banner(plan: Deployment, url: str, redis_url: str, run_dir: Path) -> None:
    body = {
        "model": plan.model_name,
        "stream": True,
        "max_tokens": 256,
        "messages": [{"role": "user", "content": _QUESTION}],
    }
    key = ' -H "Authorization: Bearer $EKIDEN_API_KEY"' if env.api_key() else ""
    pools = ", ".join(str(pool) for pool in plan.pools if pool.size)
    say(
        f"\nready: {plan.model_name} on {url}  ({pools})\n"
        f"  redis {redis_url}, logs in {run_dir}\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        f'  ekiden chat --url {url} "{_QUESTION}"\n'
        f"{_handed_over(plan, url)}"
        f"  ekiden audit --redis {redis_url}\n\n"
        "Ctrl-C drains and ends all of it."
    )


def _handed_over(plan: Deployment, url: str) -> str:
    """An example that is long enough for the prefill pool, where there is one."""
    if not any(pool.size for pool in plan.pools if pool.role == "prefill"):
        return ""
    return (
        f'  ekiden chat --url {url} "What does this say? $(head -c 2000 README.md)"\n'
        "      (long enough to be handed over; decode prefills short prompts itself)\n"
    )


def report_death(error: ChildDied, run_dir: Path) -> int:
    """Say which child ended and show its last words. 2 if it could not be set up, else 1."""
    child = error.child
    setup = child.ready_after_s is None and child.process.returncode == 2
    words = child.tail(1 if setup else 15)
    print(f"ekiden: {error}\n{_indented(words)}\nlogs in {run_dir}", file=sys.stderr)
    return 2 if setup else 1


def report_not_ready(error: NotReady, run_dir: Path) -> int:
    print(f"ekiden: {error}", file=sys.stderr)
    for child in error.children:
        print(f"{child.spec.name}:\n{_indented(child.tail(5))}", file=sys.stderr)
    print(f"logs in {run_dir}", file=sys.stderr)
    return 3


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
