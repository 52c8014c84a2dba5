"""A gateway over real HTTP, real gRPC and a real Redis; the decode replica is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from fake_decode import FakeDecode
from live_gateway import MODEL, Live, live_gateway, model_dir

from ekiden.core.config import GatewayConfig
from ekiden.registry.registration import Registration
from ekiden.text.tokenizer import Tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return model_dir(tmp_path / "tiny")


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture
def config(directory: Path, redis_url: str) -> GatewayConfig:
    return GatewayConfig(models={MODEL: directory}, redis_url=redis_url, port=0, secret="s")


@pytest.fixture
async def decode(tokenizer: Tokenizer) -> AsyncIterator[FakeDecode]:
    fake = FakeDecode(tokenizer, secret="s")
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def registered(decode: FakeDecode, redis_url: str) -> AsyncIterator[Registration]:
    registration = await decode.register(redis_url)
    yield registration
    await registration.close()


@pytest.fixture
async def live(config: GatewayConfig, registered: Registration) -> AsyncIterator[Live]:
    async with live_gateway(config) as found:
        yield found


@pytest.fixture
async def http(live: Live) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=live.url, trust_env=False, timeout=20) as client:
        yield client


@pytest.fixture
async def client(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as found:
        yield found
