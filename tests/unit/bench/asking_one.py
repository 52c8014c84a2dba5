"""Asks a server once, as a worker does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ekiden.bench.asking import Asker, Dialect
from ekiden.bench.http import Address, Server
from ekiden.bench.record import Record
from ekiden.bench.wording import Wording
from ekiden.bench.workload import Ask, Piece
from ekiden.core.clock import MonotonicClock

ASK = Ask(0, (Piece("p", 3),), 2)
CLOCK = MonotonicClock()


@asynccontextmanager
async def asker(url: str, *, timeout_s: float = 20.0) -> AsyncIterator[Asker]:
    server = Server(Address(url), api_key="", clock=CLOCK)
    try:
        yield Asker(
            server,
            Dialect(),
            model="m",
            wording=Wording(),
            timeout_s=timeout_s,
            clock=CLOCK,
            began=CLOCK.now(),
        )
    finally:
        await server.close()


async def ask_once(url: str, *, timeout_s: float = 20.0) -> Record:
    async with asker(url, timeout_s=timeout_s) as asking:
        return await asking.ask(asking.due(ASK, CLOCK.now()))
