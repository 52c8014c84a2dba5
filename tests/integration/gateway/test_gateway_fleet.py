"""Which replicas are asked, and what the gateway says of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from asking import CHAT, WAIT_S, metric, until_metric
from fake_decode import MAX_MODEL_LEN, FakeDecode
from live_gateway import MODEL, live_gateway, model_dir

from ekiden.core.config import GatewayConfig
from ekiden.core.errors import ReplicaFailed
from ekiden.registry.record import DRAINING, READY, UNWELL
from ekiden.registry.registration import Registration
from ekiden.text.tokenizer import Tokenizer


async def test_metrics_tell_sources_phases_fallbacks_and_replicas(http: httpx.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3})
    prompt = await metric(http, 'ekiden_prompt_tokens_total{model="tiny",source="prefill_computed"')
    assert prompt > 0
    phase = 'ekiden_phase_seconds_sum{model="tiny",phase='
    assert await metric(http, f'{phase}"transfer"') == pytest.approx(0.03)
    assert await metric(http, f'{phase}"queue"') == pytest.approx(0.01)
    assert await metric(http, 'ekiden_fallbacks_total{kind="local_prefill"') == 1
    assert await metric(http, 'ekiden_replicas{model="tiny",role="decode"') == 1
    assert await metric(http, 'ekiden_ttft_seconds_count{model="tiny"') == 1
    assert await metric(http, "ekiden_registry_stale_seconds") == 0
    ok = 'ekiden_requests_total{endpoint="/v1/chat/completions",status="200"'
    assert await metric(http, ok) == 1


async def test_probes_answer_get_and_head(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert (await http.get(path)).status_code == 200
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")


async def test_models_are_listed_with_their_limit(client: openai.AsyncOpenAI) -> None:
    (card,) = (await client.models.list()).data
    assert (card.id, card.model_dump()["max_model_len"]) == (MODEL, MAX_MODEL_LEN)
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_a_failing_replica_is_replaced_before_the_first_token_and_it_is_told(
    config: GatewayConfig, decode: FakeDecode, tokenizer: Tokenizer, redis_url: str
) -> None:
    broken = FakeDecode(tokenizer, secret="s")
    broken.refuse_with = ReplicaFailed("a rank died")
    await broken.start()
    both = [await decode.register(redis_url), await broken.register(redis_url, name="d-2")]
    try:
        async with live_gateway(config) as live, httpx.AsyncClient(trust_env=False) as http:
            fallbacks: list[str] = []
            for _ in range(4):
                url = f"{live.url}/v1/chat/completions"
                response = await http.post(url, json={**CHAT, "max_tokens": 2})
                assert response.status_code == 200
                ours = response.json()["usage"]["ekiden"]["fallbacks"]
                fallbacks += [f["reason"] for f in ours if f["kind"] == "decode_retry"]
            assert len(fallbacks) == len(broken.requests)
            assert len(broken.requests) <= 1  # suspect after its first failure
            assert all("a rank died" in reason for reason in fallbacks)
    finally:
        for registration in both:
            await registration.close()
        await broken.stop()


async def test_requests_spread_over_equal_replicas_and_avoid_a_draining_one(
    config: GatewayConfig, tokenizer: Tokenizer, redis_url: str
) -> None:
    fakes = [FakeDecode(tokenizer, secret="s") for _ in range(3)]
    registrations = []
    for index, fake in enumerate(fakes):
        await fake.start()
        fake.gate.clear()
        registrations.append(await fake.register(redis_url, name=f"d-{index}"))
    try:
        async with live_gateway(config) as live, httpx.AsyncClient(trust_env=False) as http:
            url = f"{live.url}/v1/completions"
            bodies = [{"model": MODEL, "prompt": f"number {i}"} for i in range(12)]
            tasks = [asyncio.ensure_future(http.post(url, json=body)) for body in bodies]
            async with asyncio.timeout(WAIT_S):
                while sum(len(fake.requests) for fake in fakes) < 12:
                    await asyncio.sleep(0.02)
            assert [len(fake.requests) for fake in fakes] == [4, 4, 4]
            for fake in fakes:
                fake.gate.set()
            await asyncio.gather(*tasks)
            await registrations[0].set_status(DRAINING)
            async with asyncio.timeout(WAIT_S):
                while DRAINING not in [r.status for r in live.gateway.fleet.replicas()]:
                    await asyncio.sleep(0.02)
            await asyncio.gather(*(http.post(url, json=body) for body in bodies[:6]))
            assert [len(fake.requests) for fake in fakes] == [4, 7, 7]
    finally:
        for registration in registrations:
            await registration.close()
        for fake in fakes:
            await fake.stop()


async def test_prefill_candidates_go_down_with_the_request(
    http: httpx.AsyncClient, decode: FakeDecode, redis_url: str
) -> None:
    records = [
        decode.record(f"p-{i}", epoch=i, role="prefill", address=f"127.0.0.1:{i}")
        for i in range(1, 6)
    ]
    registrations = [Registration(redis_url, record) for record in records]
    for registration in registrations:
        await registration.start()
    await until_metric(http, 'ekiden_replicas{model="tiny",role="prefill"}', 5)
    await http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    (candidates,) = decode.prefill
    assert len({candidate.replica_id for candidate in candidates}) == 3
    assert all(c.address == f"127.0.0.1:{c.epoch}" for c in candidates)
    for registration in registrations:
        await registration.close()


async def test_a_prefill_replica_that_takes_less_limits_nobody(
    http: httpx.AsyncClient, decode: FakeDecode, redis_url: str
) -> None:
    small = decode.record("p-1", role="prefill", address="127.0.0.1:1", max_model_len=8)
    registration = Registration(redis_url, small)
    await registration.start()
    async with asyncio.timeout(5):
        while not (decode.prefill and decode.prefill[-1]):
            body = {"model": MODEL, "prompt": "hello world, " * 20, "max_tokens": 1}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
    await registration.close()


async def test_without_a_replica_503_says_what_is_missing_and_when_to_come_back(
    config: GatewayConfig, decode: FakeDecode, redis_url: str
) -> None:
    async with live_gateway(config) as live, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{live.url}/ready")).status_code == 503
        assert (await http.get(f"{live.url}/health")).status_code == 200
        refused = await http.post(f"{live.url}/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "no decode replica of tiny" in refused.json()["error"]["message"]
        registration = await decode.register(redis_url)
        async with asyncio.timeout(WAIT_S):
            while (await http.get(f"{live.url}/ready")).status_code != 200:
                await asyncio.sleep(0.02)
        served = await http.post(f"{live.url}/v1/chat/completions", json={**CHAT, "max_tokens": 1})
        assert served.status_code == 200
        await registration.close()


async def test_an_unwell_replica_is_asked_only_when_no_other_is_left(
    config: GatewayConfig, tokenizer: Tokenizer, redis_url: str
) -> None:
    fakes = [FakeDecode(tokenizer, secret="s") for _ in range(2)]
    for fake in fakes:
        await fake.start()
    sick = await fakes[0].register(redis_url, name="d-1", status=UNWELL)
    well = await fakes[1].register(redis_url, name="d-2", status=READY)
    try:
        async with live_gateway(config) as live, httpx.AsyncClient(trust_env=False) as http:
            url, body = f"{live.url}/v1/completions", {"model": MODEL, "prompt": "a"}
            for _ in range(6):
                assert (await http.post(url, json=body)).status_code == 200
            assert [len(fake.requests) for fake in fakes] == [0, 6]
            await well.close()
            async with asyncio.timeout(WAIT_S):
                while not fakes[0].requests:
                    assert (await http.post(url, json=body)).status_code == 200
    finally:
        await sick.close()
        for fake in fakes:
            await fake.stop()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer_fingerprint": "other"}, "another tokenizer.json"),
        ({"status": DRAINING}, "is draining"),
        ({"address": "127.0.0.1:1"}, "cannot be reached"),
    ],
)
async def test_a_replica_that_cannot_serve_is_named_with_the_reason(
    config: GatewayConfig, decode: FakeDecode, redis_url: str, changes: dict[str, str], says: str
) -> None:
    registration = Registration(redis_url, decode.record(**changes))
    await registration.start()
    async with live_gateway(config) as live, httpx.AsyncClient(trust_env=False) as http:
        refused = await http.post(f"{live.url}/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert says in refused.json()["error"]["message"]
        assert "d-1" in refused.json()["error"]["message"]
    await registration.close()


async def test_a_wrong_secret_is_told_to_the_operator_not_hidden(
    config: GatewayConfig, tokenizer: Tokenizer, redis_url: str
) -> None:
    fake = FakeDecode(tokenizer, secret="another")
    await fake.start()
    registration = await fake.register(redis_url)
    async with live_gateway(config) as live, httpx.AsyncClient(trust_env=False) as http:
        async with asyncio.timeout(WAIT_S):
            while True:
                refused = await http.post(f"{live.url}/v1/chat/completions", json=CHAT)
                assert refused.status_code in (502, 503)
                if "EKIDEN_SECRET" in refused.json()["error"]["message"]:
                    break
        assert fake.requests == []
    await registration.close()
    await fake.stop()


async def test_a_replica_that_restarts_is_served_by_its_new_life(
    config: GatewayConfig, decode: FakeDecode, tokenizer: Tokenizer, redis_url: str
) -> None:
    first = await decode.register(redis_url, epoch=1)
    async with live_gateway(config) as live, httpx.AsyncClient(trust_env=False) as http:
        url = f"{live.url}/v1/chat/completions"
        assert (await http.post(url, json={**CHAT, "max_tokens": 1})).status_code == 200
        await decode.stop()
        again = FakeDecode(tokenizer, secret="s")
        await again.start()
        second = await again.register(redis_url, epoch=2)
        async with asyncio.timeout(WAIT_S):
            while (await http.post(url, json={**CHAT, "max_tokens": 1})).status_code != 200:
                await asyncio.sleep(0.02)
        assert len(again.requests) == 1
        await first.close()
        await second.close()
        await again.stop()


async def test_two_models_in_one_gateway_have_their_own_tokenizers_and_templates(
    config: GatewayConfig, decode: FakeDecode, tmp_path: Path, redis_url: str
) -> None:
    import msgspec
    from tiny_tokenizers import byte_fallback

    other = model_dir(tmp_path / "other", byte_fallback(), chat_template=None)
    two = msgspec.structs.replace(config, models={**config.models, "other": other})
    theirs = FakeDecode(Tokenizer.load(other), secret="s")
    await theirs.start()
    registrations = [
        await decode.register(redis_url),
        await theirs.register(redis_url, name="d-2", model="other"),
    ]
    async with live_gateway(two) as live, httpx.AsyncClient(trust_env=False) as http:
        bodies = [{"model": name, "prompt": "a b", "max_tokens": 2} for name in ("tiny", "other")]
        answers = [await http.post(f"{live.url}/v1/completions", json=body) for body in bodies]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert decode.requests[0].prompt != theirs.requests[0].prompt
        chat = await http.post(f"{live.url}/v1/chat/completions", json={**CHAT, "model": "other"})
        assert chat.status_code == 400
        assert "no chat template" in chat.json()["error"]["message"]
    for registration in registrations:
        await registration.close()
    await theirs.stop()
