"""``ekiden top --once`` against a gateway and a replica that are there."""

from __future__ import annotations

import asyncio
import sys

import httpx
from asking import CHAT
from live_gateway import Live

from ekiden.core.config import GatewayConfig


async def test_one_look_shows_the_replicas_and_what_was_asked(
    http: httpx.AsyncClient, live: Live, config: GatewayConfig
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ekiden.cli", "top", "--once", "--interval", "4"),
        *("--redis", config.redis_url, "--url", live.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    waiting = asyncio.ensure_future(process.communicate())
    asked = 0
    while not waiting.done():
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        asked += 1
        await asyncio.wait({waiting}, timeout=0.05)
    out, err = await waiting
    assert (process.returncode, err) == (0, b"")
    shown = out.decode()
    assert "decode    1 replica" in shown
    assert "d-1" in shown
    assert "0.0 errors/s" in shown
    assert "TTFT P50" in shown
    assert "0.0 answers/s" not in shown, asked
