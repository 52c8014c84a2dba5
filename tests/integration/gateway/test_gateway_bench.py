"""``ekiden bench`` against a real gateway: exact prompts, and what only our services tell."""

from __future__ import annotations

import pytest
from live_gateway import Live

from ekiden.bench import service
from ekiden.bench.asking import Dialect
from ekiden.bench.config import BenchConfig, Load
from ekiden.bench.result import Result
from ekiden.bench.sweep import run
from ekiden.bench.workload import Drawn, Shape

COUNT = 12


async def bench(live: Live, endpoint: str) -> Result:
    config = BenchConfig(
        url=live.url,
        dialect=Dialect(endpoint=endpoint),
        workload=Drawn(shapes=(Shape(40, 6),)),
        workload_name="40/6",
        loads=(Load(kind="concurrency", value=3),),
        count=COUNT,
        warmups=1,
        processes=1,
        timeout_s=20.0,
    )
    return await run(config, lambda *_: None, lambda _: None)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_every_prompt_has_its_tokens_and_every_answer_its_account(live: Live, endpoint: str):
    found = await bench(live, endpoint)
    (level,) = found.levels
    assert (level.succeeded, level.errors) == (COUNT, {})
    assert found.prompts.startswith("exact by the server's count (digits")
    assert (level.prompt_tokens.min, level.prompt_tokens.max) == (40, 40)
    assert (level.output_tokens.min, level.output_tokens.max) == (6, 6)
    assert level.service is not None
    assert sum(level.service.prompt_sources.values()) == COUNT * 40
    (share,) = [share for share in level.service.replicas if share.role == "decode"]
    assert (share.requests, share.tokens) == (COUNT, COUNT * 6)
    assert level.service.imbalance["decode"] == 1.0


async def test_the_gateways_gauges_are_read_while_a_level_runs(
    live: Live, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "EVERY_S", 0.01)
    (level,) = (await bench(live, "completions")).levels
    assert level.service is not None
    gauges = level.service.gauges
    assert set(gauges) >= {"requests in flight", "requests running", "communication share"}
    assert set(gauges["requests running"]) == {"d-1"}
    # Three at a time; beside each new one the gateway may still be closing the one before.
    assert gauges["requests in flight"][""].max <= 6
