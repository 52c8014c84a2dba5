"""Deployments that are asked for something while doctor watches them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
from stack import MODEL

from ekiden.cli.doctor_page import page
from ekiden.doctor.finding import Diagnosis
from ekiden.doctor.symptoms import diagnose
from ekiden.doctor.watch import Watch

_seeds = itertools.count()

Ask = Callable[[], Awaitable[object]]


class Asker:
    """Clients of a gateway. Prompts are random letters, a token each: no cache helps."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url, self._http = url, http

    async def ask(self, prompt: int, answer: int) -> int:
        """One answer; the HTTP status."""
        letters = random.Random(next(_seeds)).choices("abcdefghijklmnopqrstuvwxyz", k=prompt)
        body = {
            "model": MODEL, "prompt": "".join(letters), "max_tokens": answer,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        response = await self._http.post(f"{self.url}/v1/completions", json=body)
        return response.status_code

    @asynccontextmanager
    async def asking(self, at_once: int, prompt: int, answer: int) -> AsyncIterator[None]:
        """So many clients, each asking one thing after the other while the block lasts."""

        async def client() -> None:
            while True:
                await self.ask(prompt, answer)

        tasks = [asyncio.ensure_future(client()) for _ in range(at_once)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def asker(url: str) -> AsyncIterator[Asker]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120.0, trust_env=False, limits=limits) as http:
        yield Asker(url, http)


async def watched(redis_url: str, url: str, seconds: float = 6.0) -> Diagnosis:
    """What doctor says of a deployment, printed for whoever reads a test's output."""
    found = diagnose(await Watch(redis_url, url).run(seconds, lambda _passed: None))
    print(page(found))
    return found


def found_in(diagnosis: Diagnosis) -> dict[str, str]:
    """The likeliest cause of each symptom that was found."""
    return {one.requirement: one.causes[0].what for one in diagnosis.findings}
