"""A prefill replica that knows nothing of speculation, and a decode replica that speculates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from client import generate, request
from stack import Stack, TinyModel, wait_idle

SPECULATIVE = ("--speculative-config", '{"num_speculative_tokens": 4, "prompt_lookup_max": 3}')
PROMPT = list(range(30, 70)) * 2
ASKED = (
    {"max_tokens": 60},
    {"max_tokens": 60, "logit_bias": {40: 8.0, 41: 8.0}, "temperature": 0.7, "n": 2},
    {"max_tokens": 40, "temperature": 0.6, "repetition_penalty": 1.1, "logprobs": 1},
)


@pytest.mark.slow
async def test_a_pair_that_disagrees_on_speculation_answers_like_one_without(
    tiny_model: TinyModel, tmp_path: Path, redis_url: str
) -> None:
    async with Stack(tmp_path / "run", tiny_model.directory, redis_url) as stack:
        prefill, plain, guess = await stack.start_all(
            ("prefill", "p-1"),
            ("decode", "d-plain", "--local-prefill-tokens", "0"),
            ("decode", "d-guess", "--local-prefill-tokens", "0", *SPECULATIVE),
        )
        gateway = await stack.start_gateway()
        for i, sampling in enumerate(ASKED):
            asked = request(PROMPT, salt=f"{i}", **sampling)
            alike = await generate(plain, asked, prefill.candidate)
            answer = await generate(guess, request(PROMPT, **sampling), prefill.candidate)
            for choice in range(asked.sampling.n):
                assert answer.tokens(choice) == alike.tokens(choice)
            assert answer.completion.fallbacks == alike.completion.fallbacks == ()
            if not i:
                assert answer.tokens() == tiny_model.greedy(PROMPT, 60)
        assert await accepted(gateway, "d-guess") > 0
        await wait_idle(prefill, plain, guess)


async def accepted(gateway: str, replica: str) -> float:
    """What the gateway's metrics say of a replica, once its next heartbeat has told them."""
    name = f'ekiden_speculated_tokens{{outcome="accepted",replica="{replica}"}} '
    async with asyncio.timeout(20), httpx.AsyncClient(base_url=gateway) as http:
        while True:
            lines = (await http.get("/metrics")).text.splitlines()
            for line in lines:
                if line.startswith(name):
                    return float(line.removeprefix(name))
            await asyncio.sleep(0.1)
