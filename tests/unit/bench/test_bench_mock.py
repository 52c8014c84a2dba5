"""The mock keeps its pace, and tells where it did not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ekiden.bench import mock
from ekiden.bench.mock import Lateness, MockConfig

BODY = b'{"prompt": "a b", "max_tokens": 4, "stream": true}'
SCOPE = {"type": "http", "path": "/v1/completions", "method": "POST"}


async def answer(late: Lateness, *, busy_s: float = 0.0) -> None:
    """One answer, over a connection each write to which takes ``busy_s`` of the whole loop."""
    loop = asyncio.get_running_loop()

    async def receive() -> dict[str, Any]:
        return {"body": BODY}

    async def send(message: Any) -> None:
        until = loop.time() + busy_s
        while loop.time() < until:
            pass

    await mock.app(MockConfig(ttft_s=0.0, itl_s=0.0), late)(SCOPE, receive, send)  # type: ignore[arg-type]


async def test_every_token_is_accounted_for_first_ones_apart():
    late = Lateness()
    await answer(late)
    await answer(late)
    assert (late.first.count, late.later.count) == (2, 6)


async def test_what_holds_the_server_up_shows_in_its_account():
    late = Lateness()
    await answer(late, busy_s=0.02)
    assert late.first.largest_s >= 0.02
    assert late.later.largest_s >= 0.08


def test_the_account_is_told_in_milliseconds_and_of_nothing_nothing():
    late = Lateness()
    assert list(late.lines()) == []
    for _ in range(3):
        late.add(0, 0.0125)
    late.add(1, 0.004)
    first, later = late.lines()
    assert first.startswith("3 first tokens left late by 12.5")
    assert later.endswith("4.00 ms at most")
    assert late.first.percentile(50) == pytest.approx(0.0125, rel=0.01)
