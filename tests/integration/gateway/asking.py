"""What the tests of the gateway ask it, and how they read what it says."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
from live_gateway import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello world"}]}
WAIT_S = 20.0
"""For what is about to happen; a busy machine takes its time."""


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every event, ``[DONE]`` included."""
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [b if (b := block[6:]) == "[DONE]" else json.loads(b) for block in blocks]


def text_of(stream: list[Any], index: int = 0) -> str:
    choices = [c for e in stream if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


async def metric(http: httpx.AsyncClient, name: str) -> float:
    text = (await http.get("/metrics")).text
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name)]
    return float(values[0]) if values else math.nan


async def until_metric(http: httpx.AsyncClient, name: str, value: float) -> None:
    async with asyncio.timeout(WAIT_S):
        while await metric(http, name) != value:
            await asyncio.sleep(0.02)
