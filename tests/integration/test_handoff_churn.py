"""Decode replicas join, leave in order and are killed while requests come: every request ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from fake_decode import FakeDecode
from live_gateway import MODEL, live_gateway, model_dir

from ekiden.core.config import GatewayConfig
from ekiden.registry.registration import Registration
from ekiden.text.tokenizer import Tokenizer

AT_ONCE = 8
BODY = {"model": MODEL, "prompt": "hello world", "max_tokens": 8, "temperature": 0}
ENDS = (200, 502, 503)


class Scale(NamedTuple):
    """At least so many ``turns`` of the pool and so many requests; a turn ``every_s``."""

    turns: int
    requests: int
    every_s: float


class Pool:
    """Three scripted replicas; ``turn`` replaces the oldest."""

    def __init__(self, tokenizer: Tokenizer, redis_url: str) -> None:
        self._tokenizer, self._redis_url = tokenizer, redis_url
        self._members: list[tuple[FakeDecode, Registration]] = []
        self.lives = self.kills = 0

    async def join(self) -> None:
        fake = FakeDecode(self._tokenizer, secret="s")
        await fake.start()
        self.lives += 1
        name = f"d-{self.lives % 4}"  # names come again, with another epoch
        registration = await fake.register(self._redis_url, id=name, epoch=self.lives)
        self._members.append((fake, registration))

    @property
    def newest(self) -> FakeDecode:
        return self._members[-1][0]

    async def turn(self, *, killed: bool) -> None:
        """A new one comes; the oldest is killed, or says that it leaves."""
        await self.join()
        fake, registration = self._members.pop(0)
        if killed:
            self.kills += 1
            await fake.stop()
            await registration.close()
        else:
            await registration.close()
            await fake.stop()

    async def close(self) -> None:
        for fake, registration in self._members:
            await registration.close()
            await fake.stop()


@pytest.fixture
async def pool(tmp_path: Path, redis_url: str) -> AsyncIterator[Pool]:
    pool = Pool(Tokenizer.load(model_dir(tmp_path / "tiny")), redis_url)
    for _ in range(3):
        await pool.join()
    yield pool
    await pool.close()


@pytest.mark.parametrize(
    "scale",
    [
        Scale(turns=6, requests=0, every_s=0.0),
        pytest.param(Scale(turns=3, requests=1000, every_s=2.0), marks=pytest.mark.slow),
    ],
    ids=["fast", "a thousand requests, one goes every two seconds"],
)
async def test_no_request_is_without_an_end_while_members_come_and_go(
    pool: Pool, tmp_path: Path, redis_url: str, scale: Scale
) -> None:
    config = GatewayConfig(
        models={MODEL: tmp_path / "tiny"}, redis_url=redis_url, port=0, secret="s"
    )
    ends: Counter[int] = Counter()
    texts: set[str] = set()
    over, rng = asyncio.Event(), random.Random(1)

    async def client(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            answer = await http.post("/v1/completions", json=BODY)
            ends[answer.status_code] += 1
            if answer.status_code == 200:
                texts.add(answer.json()["choices"][0]["text"])
            else:
                assert answer.json()["error"]["message"]

    async def churn() -> None:
        turns = 0
        while turns < scale.turns or ends.total() < scale.requests:
            await pool.turn(killed=rng.random() < 0.5)
            turns += 1
            async with asyncio.timeout(60):
                while not pool.newest.requests:  # the gateway has found it and sends it work
                    await asyncio.sleep(0.01)
            await asyncio.sleep(scale.every_s)
        over.set()

    async with (
        live_gateway(config) as live,
        httpx.AsyncClient(base_url=live.url, trust_env=False, timeout=20) as http,
    ):
        async with asyncio.timeout(20):
            while (await http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.02)
        await asyncio.gather(churn(), *(client(http) for _ in range(AT_ONCE)))
    print(f"{pool.lives} lives, answers by status: {dict(ends)}")
    assert set(ends) <= set(ENDS)
    # Only who was with a replica when it was killed may have been failed.
    assert ends.total() - ends[200] <= pool.kills * AT_ONCE
    assert ends[200] > scale.turns
    assert ends.total() >= scale.requests
    assert len(texts) == 1
