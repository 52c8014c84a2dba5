"""Each trouble made for real, on real processes over a tiny model, and what doctor says of it.

docs/doctor.md has the table: which symptom, made how, found or not.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from client import generate, request
from patients import (
    asker,
    bench,
    causes_of,
    doctor,
    found_in,
    judged,
    mock_server,
    save_layers,
    watched,
)
from stack import MODEL, Stack, TinyModel, ranks_of, save_tiny_model

from ekiden.doctor.evidence import Evidence, Objectives
from ekiden.doctor.same_prompts import compare
from ekiden.doctor.symptoms import diagnose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Ward:
    """Starts stacks; those of one database of Redis share a registry."""

    def __init__(self, model: Path, redis: str, folder: Path) -> None:
        self.redis, self._model, self._folder = redis, model, folder
        self._count = 0

    @asynccontextmanager
    async def stack(self, model: Path | None = None, database: int = 0) -> AsyncIterator[Stack]:
        self._count += 1
        folder = self._folder / str(self._count)
        redis = f"{self.redis.rpartition('/')[0]}/{database}"
        async with Stack(folder, model or self._model, redis) as stack:
            yield stack


@pytest.fixture
def ward(tiny_model: TinyModel, redis_url: str, tmp_path: Path) -> Ward:
    return Ward(tiny_model.directory, redis_url, tmp_path)


async def test_a_healthy_pair_has_a_clean_bill(ward: Ward) -> None:
    async with ward.stack() as stack:
        url = await stack.deploy(("prefill", "p-1"), ("decode", "d-1"))
        async with asker(url) as client, client.asking(2, prompt=600, answer=24):
            found = await watched(ward.redis, url)
    assert found_in(found) == {}
    assert {one.requirement for one in found.unseen} == {"R46", "R48", "R54"}
    (situation,) = found.evidence.situations
    assert situation.answers is not None
    assert situation.answers.count > 10


async def test_the_command_looks_at_a_pair_before_it_serves_and_while_it_does(
    ward: Ward, tiny_model: TinyModel
) -> None:
    """Pre-flight for one more replica beside a pair that has met, then a watch of ten seconds."""
    async with ward.stack() as stack:
        url = await stack.deploy(("prefill", "p-1"), ("decode", "d-1"))
        async with asker(url) as client:
            await client.ask(prompt=600, answer=4)
            model = (str(tiny_model.directory), "--served-model-name", MODEL)
            before = await doctor("--preflight", *model, "--redis", ward.redis)
            async with client.asking(2, prompt=600, answer=24):
                serving = await doctor("--redis", ward.redis, "--url", url, "--watch", "5")
    assert before.code == 0, before.text
    assert "d-1 from p-1: shm" in before.text
    assert "1 prefill, 1 decode, all answer" in before.text
    assert "d-1, p-1, this one" in before.text
    assert serving.code == 0, serving.text
    assert "nothing found" in serving.text


async def test_a_replica_that_would_not_fit_is_told_before_it_serves(
    ward: Ward, tmp_path: Path
) -> None:
    """Another checkpoint under the same name, and a port that is taken."""
    save_tiny_model(tmp_path / "other", seed=1)
    async with ward.stack() as stack:
        (decode,) = await stack.start_all(("decode", "d-1"))
        other = (str(tmp_path / "other"), "--served-model-name", MODEL)
        port = decode.address.rpartition(":")[2]
        found = await doctor("--preflight", *other, "--redis", ward.redis, "--port", port)
    assert found.code == 1
    failures = [line for line in found.text.splitlines() if line.startswith("FAILURE")]
    assert [line.split()[1] for line in failures] == ["port", "model"], failures


async def test_a_long_prompt_is_told_from_a_queue(ward: Ward, tmp_path: Path) -> None:
    """R53, against an objective."""
    save_layers(tmp_path / "four", layers=4)
    async with ward.stack(tmp_path / "four") as stack:
        url = await stack.deploy(("decode", "d-1"))
        async with asker(url) as client, client.asking(1, prompt=2000, answer=1):
            found = await watched(ward.redis, url, objectives=Objectives(ttft_s=0.1))
    assert found_in(found)["R53"] == "prompts are long for what computes them"


async def test_a_prefill_pool_that_is_too_small_is_a_queue(ward: Ward) -> None:
    """R53, and the ratio of R55."""
    async with ward.stack() as stack:
        url = await stack.deploy(("prefill", "p-1"), ("decode", "d-1"))
        async with asker(url) as client, client.asking(24, prompt=2500, answer=2):
            found = await watched(ward.redis, url)
    assert "queue for prefill" in found_in(found)["R53"]
    assert "prefill has too few replicas" in found_in(found)["R55"]


async def test_short_prompts_over_a_slow_wire_should_not_be_handed_over(ward: Ward) -> None:
    """R55."""
    slow = ("--kv-rate-limit", "1M")
    async with ward.stack() as stack:
        url = await stack.deploy(
            ("prefill", "p-1", *slow), ("decode", "d-1", *slow, "--local-prefill-tokens", "0")
        )
        async with asker(url) as client:
            await client.ask(prompt=120, answer=4)  # they meet, and measure their wire
            async with client.asking(2, prompt=120, answer=4):
                found = await watched(ward.redis, url)
    causes = causes_of(found, "R55")
    assert "short" in causes[0].what
    assert "--local-prefill-tokens 128" in causes[0].remedy
    assert "link" in causes[1].what


async def test_a_slow_wire_is_to_blame_where_prompts_are_long(ward: Ward) -> None:
    """R55; and requests whose KV is on its way are not said to stand in the gateway (R51)."""
    slow = ("--kv-rate-limit", "1M")
    async with ward.stack() as stack:
        url = await stack.deploy(("prefill", "p-1", *slow), ("decode", "d-1", *slow))
        async with asker(url) as client:
            await client.ask(prompt=800, answer=4)  # they meet, and measure their wire
            async with client.asking(6, prompt=800, answer=4):
                found = await watched(ward.redis, url, 10.0)
    assert "the link" in found_in(found)["R55"]
    assert "R51" not in found_in(found)
    (situation,) = found.evidence.situations
    (decode,) = situation.of("decode")
    assert decode.receiving > 3


async def test_a_rank_that_is_killed_takes_its_replica_along(ward: Ward) -> None:
    """R49."""
    async with ward.stack() as stack:
        decode, _ = await stack.start_all(("decode", "d-1", "-tp", "2"), ("decode", "d-2"))
        url = await stack.start_gateway()
        async with asker(url) as client, client.asking(2, prompt=100, answer=8):
            loop = asyncio.get_running_loop()
            loop.call_later(1.5, os.kill, ranks_of(decode)[0], signal.SIGKILL)
            found = await watched(ward.redis, url, 10.0)
    assert found_in(found)["R49"] == "d-1 is gone: its 2 ranks are one failure domain"


async def test_a_replica_that_is_asked_past_the_gateway_queues_beside_an_idle_one(
    ward: Ward,
) -> None:
    """R50."""
    async with ward.stack() as stack:
        few = ("--max-num-seqs", "4")
        busy, _ = await stack.start_all(("decode", "d-1", *few), ("decode", "d-2", *few))
        url = await stack.start_gateway()
        asked = [generate(busy, request([5] * 200, max_tokens=2000)) for _ in range(12)]
        tasks = [asyncio.ensure_future(one) for one in asked]
        found = await watched(ward.redis, url)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert "dealt out by number" in found_in(found)["R50"]


async def test_a_pool_of_blocks_that_is_too_small_is_named(ward: Ward) -> None:
    """R47."""
    async with ward.stack() as stack:
        small = ("--num-gpu-blocks-override", "100", "--max-model-len", "1024")
        url = await stack.deploy(("decode", "d-1", *small))
        async with asker(url) as client, client.asking(8, prompt=600, answer=60):
            found = await watched(ward.redis, url)
    assert "KV cache is smaller" in found_in(found)["R47"]


async def test_a_batch_of_one_starves_the_device(ward: Ward) -> None:
    """R51."""
    async with ward.stack() as stack:
        url = await stack.deploy(("decode", "d-1", "--max-num-seqs", "1"))
        async with asker(url) as client, client.asking(6, prompt=60, answer=60):
            found = await watched(ward.redis, url)
    assert "batch is capped" in found_in(found)["R51"]
    assert "now 1" in causes_of(found, "R51")[0].remedy


async def test_a_load_that_its_own_client_cannot_make_is_told(tmp_path: Path) -> None:
    """R51: a server that answers at once, asked for more than one process can send."""
    async with mock_server() as url:
        file = await bench(url, tmp_path / "run.json", rate=4000, requests=6000)
    assert "the load itself is the limit" in found_in(judged(file))["R51"]


async def test_layers_that_the_stages_do_not_divide_leave_one_of_them_idle(
    ward: Ward, tmp_path: Path
) -> None:
    """R45."""
    save_layers(tmp_path / "three", layers=3)
    async with ward.stack(tmp_path / "three") as stack:
        url = await stack.deploy(("decode", "d-1", "-pp", "2"))
        async with asker(url) as client, client.asking(4, prompt=1000, answer=4):
            found = await watched(ward.redis, url)
    assert "stage" in found_in(found)["R45"]


async def test_long_prompts_between_the_tokens_of_others_are_seen(
    ward: Ward, tmp_path: Path
) -> None:
    """R44."""
    save_layers(tmp_path / "two", layers=2)
    async with ward.stack(tmp_path / "two") as stack:
        url = await stack.deploy(("decode", "d-1", "--max-num-batched-tokens", "4096"))
        async with (
            asker(url) as client,
            client.asking(3, prompt=60, answer=16),
            client.asking(1, prompt=2000, answer=1),
        ):
            found = await watched(ward.redis, url, 10.0, Objectives(tpot_s=0.01))
    assert "prefilled in the steps" in " ".join(one.what for one in causes_of(found, "R44"))


async def test_two_ranks_on_a_model_that_fits_one_are_slower(ward: Ward, tmp_path: Path) -> None:
    """R43: by the collectives of one run, and by two runs of a bench."""
    files = []
    for tp in ("1", "2"):
        async with ward.stack() as stack:
            url = await stack.deploy(("decode", f"tp{tp}", "-tp", tp))
            files.append(await bench(url, tmp_path / f"tp{tp}.json", concurrency=2))
            if tp == "2":
                async with asker(url) as client, client.asking(2, prompt=100, answer=100):
                    watching = await watched(ward.redis, url)
    assert "more in its collectives" in found_in(watching)["R43"]
    assert any("TP2 is slower than TP1" in one.what for one in causes_of(judged(*files), "R43"))


async def test_a_split_that_does_not_pay_is_told_by_two_runs(ward: Ward, tmp_path: Path) -> None:
    """R55, against an aggregated run of the same load."""
    slow = ("--kv-rate-limit", "1M")
    async with ward.stack() as stack:
        url = await stack.deploy(("decode", "d-1"))
        whole = await bench(url, tmp_path / "whole.json", concurrency=2)
    async with ward.stack() as stack:
        url = await stack.deploy(
            ("prefill", "p-1", *slow), ("decode", "d-1", *slow, "--local-prefill-tokens", "0")
        )
        apart = await bench(url, tmp_path / "apart.json", concurrency=2)
    causes = causes_of(judged(whole, apart), "R55")
    assert any("does not pay" in one.what for one in causes)


async def test_three_replicas_on_one_machine_do_not_give_three_times_as_much(
    ward: Ward, tmp_path: Path
) -> None:
    """R48."""
    files = []
    for count in (1, 3):
        async with ward.stack() as stack:
            url = await stack.deploy(*(("decode", f"d-{n}") for n in range(count)))
            load = {"concurrency": 4 * count}
            files.append(await bench(url, tmp_path / f"{count}.json", **load))
    assert "share what one machine has" in found_in(judged(*files))["R48"]


async def test_more_ranks_than_cores_are_busy_with_one_another(ward: Ward) -> None:
    """R52."""
    async with ward.stack() as stack:
        url = await stack.deploy(("decode", "d-1", "-tp", "3", "--max-num-seqs", "4"))
        async with asker(url) as client, client.asking(12, prompt=400, answer=40):
            found = await watched(ward.redis, url)
    assert "communicate more" in " ".join(one.what for one in causes_of(found, "R52"))


async def test_four_bits_of_a_model_that_cannot_bear_them_are_seen(
    ward: Ward, tmp_path: Path
) -> None:
    """R54."""
    model = tmp_path / "m"
    save_layers(model, layers=2, spread=0.2)
    async with ward.stack(model) as wide, ward.stack(model, database=1) as narrow:
        reference = await wide.deploy(("decode", "wide"))
        url = await narrow.deploy(("decode", "narrow", "-q", "int4"))
        same = await compare(url, reference, "")
        itself = await compare(reference, reference, "")
    assert itself.equal == itself.asked > 50
    found = diagnose(Evidence(same_prompts=same))
    assert "does not suit" in found_in(found)["R54"]
