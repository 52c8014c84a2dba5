"""A gateway on a real socket in the test's own event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import tokenizers
import uvicorn
from tiny_tokenizers import byte_level, write

from ekiden.core.config import GatewayConfig
from gateway.app import Gateway, open_gateway
from gateway.main import bind

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
MODEL = "tiny"


def model_dir(path: Path, inner: tokenizers.Tokenizer | None = None, **settings: Any) -> Path:
    return write(path, inner or byte_level(), **{"chat_template": CHAT_TEMPLATE, **settings})


class Live:
    """``url`` to talk to, ``gateway`` to look into."""

    def __init__(self, url: str, gateway: Gateway) -> None:
        self.url, self.gateway = url, gateway


@asynccontextmanager
async def live_gateway(config: GatewayConfig) -> AsyncIterator[Live]:
    listener = bind(config.host, config.port)
    with listener:
        async with open_gateway(config, rng=random.Random(0), seeds=lambda: 42) as gateway:
            settings = uvicorn.Config(
                gateway.app, http="httptools", ws="none", lifespan="off", log_config=None
            )
            server = uvicorn.Server(settings)
            task = asyncio.create_task(server._serve(sockets=[listener]))
            try:
                yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}", gateway)
            finally:
                server.should_exit = True
                server.force_exit = True
                await task
