"""The requests of a soak: random lengths, choices, temperatures; some clients leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

from chaos_clients import LEFT, RIGHT, Ask, Client, Outcome

LEAVING = 0.15
SOONEST_S, LATEST_S = 0.005, 1.0
REPLAYED = 50
REPEATED = 0.1
"""Share of requests that were asked before, and must get the same answer."""


def ask_of(number: int) -> Ask:
    """Request ``number``: mostly short prompts, some of many chunks."""
    rng = random.Random(f"soak/{number}")
    length = rng.randint(1, 200) if rng.random() < 0.8 else rng.randint(200, 1200)
    return Ask(
        number=20_000_000 + number,
        length=length,
        max_tokens=rng.randint(1, 16),
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 0.0, 0.8)),
        stream=rng.random() < 0.6,
    )


class Load:
    """Asks, and compares: ``wrong`` is every answer that was not what it had to be."""

    def __init__(self, client: Client, at_once: int) -> None:
        self._client, self._at_once = client, at_once
        self._rng = random.Random("soak")
        self.answers: dict[int, dict[int, str]] = {}
        self.done = self.left = self.repeated = 0
        self.wrong: list[str] = []

    async def run(self, count: int, every: int, report: Callable[[int], None]) -> None:
        """``count`` requests, ``at_once`` of them in flight; ``report(done)`` each ``every``."""
        numbers = self._numbers(count)

        async def work() -> None:
            async for number in numbers_of(numbers):
                await self._one(number)
                self.done += 1
                if self.done % every == 0:
                    report(self.done)

        await asyncio.gather(*(work() for _ in range(self._at_once)))

    async def replay(self) -> int:
        """Ask the first ones again; how many were compared."""
        again = [number for number in range(REPLAYED) if number in self.answers]
        for start in range(0, len(again), self._at_once):
            some = again[start : start + self._at_once]
            await asyncio.gather(*(self._check(number) for number in some))
        return len(again)

    def _numbers(self, count: int) -> list[int]:
        numbers: list[int] = []
        for number in range(count):
            old = number > REPLAYED and self._rng.random() < REPEATED
            numbers.append(self._rng.randrange(number) if old else number)
        return numbers[::-1]

    async def _one(self, number: int) -> None:
        leave = asyncio.Event()
        # The first ones stay to the end: they are what the replay is compared with.
        if number >= REPLAYED and self._rng.random() < LEAVING:
            patience = self._rng.uniform(SOONEST_S, LATEST_S)
            asyncio.get_running_loop().call_later(patience, leave.set)
        self._take(number, await self._client.ask(ask_of(number), leave=leave))

    async def _check(self, number: int) -> None:
        self._take(number, await self._client.ask(ask_of(number)))

    def _take(self, number: int, outcome: Outcome) -> None:
        if outcome.kind == LEFT:
            self.left += 1
            return
        ask = ask_of(number)
        if outcome.kind != RIGHT or outcome.finished != set(range(ask.n)):
            self.wrong.append(f"request {number}: {outcome.name}: {outcome.detail}")
        elif number not in self.answers:
            self.answers[number] = outcome.texts
        else:
            self.repeated += 1
            if self.answers[number] != outcome.texts:
                self.wrong.append(f"request {number} has another answer than before")


async def numbers_of(numbers: list[int]) -> AsyncIterator[int]:
    """Shared by all workers: each number goes to one of them."""
    while numbers:
        yield numbers.pop()
