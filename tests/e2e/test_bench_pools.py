"""``ekiden bench`` over real pools: the result tells of prefill, hand-off and caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from stack import Stack, TinyModel

from ekiden.bench.config import BenchConfig, Load
from ekiden.bench.result import Service
from ekiden.bench.sweep import run
from ekiden.bench.workload import Drawn, Shape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COUNT, PROMPT, SHARED, OUTPUT = 10, 640, 320, 5


async def bench(url: str) -> Service:
    config = BenchConfig(
        url=url,
        workload=Drawn(shapes=(Shape(PROMPT, OUTPUT),), shared_prefix=SHARED),
        workload_name="tiny",
        loads=(Load(kind="concurrency", value=2),),
        count=COUNT,
        warmups=2,
        timeout_s=60.0,
    )
    (level,) = (await run(config, lambda *_: None, lambda _: None)).levels
    assert (level.succeeded, level.errors) == (COUNT, {})
    assert (level.prompt_tokens.min, level.prompt_tokens.max) == (PROMPT, PROMPT)
    assert level.service is not None
    return level.service


async def test_hand_offs_and_the_shared_beginning_are_seen(
    tmp_path: Path, tiny_model: TinyModel, redis_url: str
):
    async with Stack(tmp_path, tiny_model.directory, redis_url) as stack:
        told = await bench(
            await stack.deploy(
                ("prefill", "prefill-0"), ("decode", "decode-0"), ("decode", "decode-1")
            )
        )
    assert sum(told.prompt_sources.values()) == COUNT * PROMPT
    assert told.prompt_sources["prefill_computed"] > 0
    assert told.cache_hit_share > 0.2
    assert set(told.phases_ms) == {"queue", "prefill", "transfer", "first_decode", "decode"}
    assert sum(s.requests for s in told.replicas if s.role == "decode") == COUNT
    assert sum(told.wires.values()) > 0
