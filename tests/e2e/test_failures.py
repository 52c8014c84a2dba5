"""What breaks in mid-flight never gives a wrong token, never hangs, and is told."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from client import generate, request, stream
from stack import Stack, TinyModel, ranks_of, until_prefilling, wait_idle

from ekiden.core.types import Completion, Delta

CHUNK = ("--max-num-batched-tokens", "64")
DECODE = ("decode", "d-1", "--local-prefill-tokens", "0")


@pytest.fixture
async def stack(tmp_path: Path, tiny_model: TinyModel, redis_url: str) -> AsyncIterator[Stack]:
    async with Stack(tmp_path, tiny_model.directory, redis_url) as running:
        yield running


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, 300), k=length)


async def _exhaust(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass


async def test_prefill_killed_in_mid_prompt_gives_the_right_answer_and_says_so(
    stack: Stack, tiny_model: TinyModel
) -> None:
    prefill, decode = await stack.start_all(("prefill", "p-1", *CHUNK), DECODE)
    prompt = prompt_of(4000)
    answering = asyncio.ensure_future(generate(decode, request(prompt), prefill.candidate))
    await until_prefilling(prefill)
    prefill.kill()
    answer = await answering
    assert answer.tokens() == tiny_model.greedy(prompt, 16)
    kinds = [fallback.kind for fallback in answer.completion.fallbacks]
    assert kinds in (["prefill_retry", "local_prefill"], ["recompute"])
    assert "p-1" in answer.completion.fallbacks[0].reason
    assert answer.completion.sources.local_computed == 4000
    await wait_idle(decode)


async def test_prefill_killed_in_mid_transfer_keeps_the_token_its_client_has_seen(
    stack: Stack, tiny_model: TinyModel
) -> None:
    prefill, decode = await stack.start_all(("prefill", "p-1"), DECODE)
    warm = await generate(decode, request(prompt_of(40)), prefill.candidate)
    assert warm.completion.fallbacks == ()
    (receiver,) = ranks_of(decode)
    prompt = prompt_of(2000, seed=1)
    items = stream(decode, request(prompt), prefill.candidate)
    # A decode rank that stands still takes no bytes: the hand-off token comes, the KV cannot.
    os.kill(receiver, signal.SIGSTOP)
    try:
        first = await anext(items)
        assert isinstance(first, Delta)
        prefill.kill()
        await prefill.child.ended
    finally:
        os.kill(receiver, signal.SIGCONT)
    rest = [item async for item in items]
    completion = rest.pop()
    assert isinstance(completion, Completion)
    tokens = list(first.tokens)
    for item in rest:
        assert isinstance(item, Delta)
        tokens += item.tokens
    assert tokens == tiny_model.greedy(prompt, 16)
    assert [fallback.kind for fallback in completion.fallbacks] == ["recompute"]
    await wait_idle(decode, within_s=15.0)


async def test_the_next_candidate_is_asked_when_the_first_is_dead(
    stack: Stack, tiny_model: TinyModel
) -> None:
    one, two, decode = await stack.start_all(("prefill", "p-1"), ("prefill", "p-2"), DECODE)
    one.kill()
    await one.child.ended
    prompt = prompt_of(100)
    answer = await generate(decode, request(prompt), one.candidate, two.candidate)
    assert answer.tokens() == tiny_model.greedy(prompt, 16)
    assert answer.completion.prefill_replica == "p-2"
    assert [fallback.kind for fallback in answer.completion.fallbacks] == ["prefill_retry"]


async def test_a_prefill_that_restarted_is_never_taken_for_its_earlier_life(
    stack: Stack, tiny_model: TinyModel
) -> None:
    prefill, decode = await stack.start_all(("prefill", "p-1"), DECODE)
    prompt = prompt_of(100)
    await generate(decode, request(prompt, salt="1"), prefill.candidate)
    port = prefill.address.rpartition(":")[2]
    prefill.kill()
    await prefill.child.ended
    again = await stack.start("prefill", "p-1", "--port", port)
    assert again.address == prefill.address
    stale = await generate(decode, request(prompt, salt="2"), prefill.candidate)
    fresh = await generate(decode, request(prompt, salt="3"), again.candidate)
    expected = tiny_model.greedy(prompt, 16)
    assert stale.tokens() == fresh.tokens() == expected
    assert [f.kind for f in stale.completion.fallbacks] == ["prefill_retry", "local_prefill"]
    assert fresh.completion.fallbacks == ()
    await wait_idle(again, decode)


async def test_sigterm_of_decode_finishes_the_stream_it_holds(
    stack: Stack, tiny_model: TinyModel
) -> None:
    prefill, decode = await stack.start_all(("prefill", "p-1"), DECODE)
    prompt = prompt_of(100)
    items = stream(decode, request(prompt, max_tokens=200), prefill.candidate)
    tokens = list((await anext(items)).tokens)  # type: ignore[union-attr]
    decode.child.process.terminate()
    async for item in items:
        if isinstance(item, Delta):
            tokens += item.tokens
    assert tokens == tiny_model.greedy(prompt, 200)
    async with asyncio.timeout(20):
        assert await decode.child.ended == 0


async def test_a_rank_that_dies_with_nothing_to_do_ends_its_replica_too(stack: Stack) -> None:
    decode = (await stack.start_all(DECODE))[0]
    os.kill(ranks_of(decode)[0], signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await decode.child.ended == 1


async def test_a_dead_rank_ends_its_replica_with_a_clear_error(stack: Stack) -> None:
    decode = (await stack.start_all(DECODE))[0]
    items = stream(decode, request(prompt_of(100), max_tokens=2000))
    await anext(items)
    (rank,) = ranks_of(decode)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(_exhaust(items), 10)
    assert "rank 0" in str(caught.value.details())
    async with asyncio.timeout(20):
        assert await decode.child.ended == 1
