"""Which wire KV takes from each prefill replica, told on the screen of ``ekiden up``.

Decode services say it in their logs when they meet a replica: soon after the start, and whenever
one joins later.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from ekiden.cli import console
from ekiden.service.supervisor import Child

AT_START_S = 3.0
"""How long the start waits for the pools to meet."""
LOOK_S = 0.05
LATER_LOOK_S = 1.0
LOOK_BYTES = 1 << 20
"""Of a log, at most, at one look."""


class Meetings:
    """What ``decoders`` have said of it, each line told once."""

    def __init__(self, decoders: Sequence[Child], prefills: int) -> None:
        self._decoders = decoders
        self._expected = prefills
        self._read = {child.spec.name: 0 for child in decoders}
        self._told: dict[str, set[str]] = {child.spec.name: set() for child in decoders}

    async def at_start(self) -> None:
        """Until every decode service has met every prefill replica of this run, or a while."""
        until = time.monotonic() + AT_START_S
        while time.monotonic() < until:
            self.tell_new()
            if all(_met(told) >= self._expected for told in self._told.values()):
                break
            await asyncio.sleep(LOOK_S)

    async def later(self) -> None:
        """For as long as the run lasts."""
        while True:
            self.tell_new()
            await asyncio.sleep(LATER_LOOK_S)

    def tell_new(self) -> None:
        for child in self._decoders:
            name = child.spec.name
            for line in console.wires(self._unread(child)):
                if line not in self._told[name]:
                    self._told[name].add(line)
                    console.say(f"  {name:<10} {line}")

    def _unread(self, child: Child) -> str:
        """Whole lines only: one that is being written is read the next time. A log may be emptied
        or moved away while the service runs."""
        name = child.spec.name
        try:
            with child.log.open("rb") as log:
                if os.fstat(log.fileno()).st_size < self._read[name]:
                    self._read[name] = 0
                log.seek(self._read[name])
                chunk = log.read(LOOK_BYTES)
        except OSError:
            self._read[name] = 0
            return ""
        text, ends, _ = chunk.rpartition(b"\n")
        if not ends and len(chunk) == LOOK_BYTES:  # no line of a meeting is so long
            text = chunk
        self._read[name] += len(text) + len(ends)
        return text.decode(errors="replace")


def _met(told: set[str]) -> int:
    """Of how many replicas it is known what came of the meeting."""
    return sum(" takes " in line or line.startswith("prefill replica") for line in told)
