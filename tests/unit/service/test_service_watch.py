"""What becomes of a rank that does not move: probes and gateways hear of it, and of its return."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.registry.record import READY, UNWELL
from ekiden.service import main


class Said:
    """A server's health and a registration's status, as they were set."""

    def __init__(self, stop_after: int) -> None:
        self.words: list[object] = []
        self.enough = asyncio.Event()
        self._count = stop_after

    async def set_serving(self, serving: bool) -> None:
        self._say(serving)

    async def set_status(self, status: str) -> None:
        self._say(status)

    def _say(self, word: object) -> None:
        self.words.append(word)
        if len(self.words) == self._count:
            self.enough.set()


async def test_a_wedged_rank_is_told_to_probes_and_to_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main, "HEALTH_INTERVAL_S", 0.0)
    pulse = iter([None, "rank 0 has not moved", "rank 0 has not moved", None, None])
    executor = SimpleNamespace(healthy=lambda: next(pulse, None))
    said = Said(stop_after=4)
    parts: Any = (SimpleNamespace(executor=executor), said, said)
    watchdog = asyncio.ensure_future(main._watch(*parts))
    await asyncio.wait_for(said.enough.wait(), 5)
    watchdog.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watchdog
    assert said.words == [False, UNWELL, True, READY]
