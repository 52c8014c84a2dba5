"""What the gateway refuses, and how a request that cannot go on ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from asking import CHAT, until_metric
from fake_decode import MAX_MODEL_LEN, FakeDecode
from live_gateway import MODEL, Live, live_gateway

from ekiden.core.config import GatewayConfig
from ekiden.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EkidenError,
    Overloaded,
    ReplicaFailed,
)
from ekiden.registry.registration import Registration

BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "messages"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "text"),
    ({"top_logprobs": 2}, "top_logprobs", '"logprobs": true'),
    ({"max_tokens": 0}, "max_tokens", ">= 1, not 0"),
    ({"temperature": "hot"}, "temperature", 'expected a number, not "hot"'),
    ({"temperature": 3}, "temperature", "<= 2.0, not 3"),
    ({"n": 1000}, "n", "<= 128"),
    ({"stop": [""]}, "stop[0]", "length >= 1"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"\N{SUPERSCRIPT TWO}": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    ({"stop_token_ids": [999999]}, "stop_token_ids", "999999"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "over the 4"),
    ({"max_tokens": MAX_MODEL_LEN}, "max_tokens", str(MAX_MODEL_LEN)),
    ({"tools": [{"type": "function"}]}, "tools", "not served"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "not served"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "not served"),
    ({"audio": {}}, "audio", "not served"),
    ({"stream_options": {"colour": 1}}, "stream_options", "colour"),
    ({"temprature": 1}, "temprature", "did you mean temperature"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, None, "tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "image_url"),
]


@pytest.mark.parametrize(("change", "field", "says"), BAD, ids=lambda v: str(v)[:40])
async def test_a_bad_field_is_a_400_that_names_it(
    http: httpx.AsyncClient,
    decode: FakeDecode,
    change: dict[str, Any],
    field: str | None,
    says: str,
) -> None:
    body = {**CHAT, **change} if change else {"model": MODEL}
    response = await http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert field is None or error["param"] == field
    assert decode.requests == []


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": ["a", "b"]}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": ""}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": [99999]}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "echo": true}', 400),
        ("POST", "/v1/completions", b'{"model": "none", "prompt": "a"}', 404),
        ("GET", "/v1/models/none", b"", 404),
        ("GET", "/nowhere", b"", 404),
        ("GET", "/v1/completions", b"", 405),
    ],
)
async def test_every_refusal_has_openai_s_shape_and_our_id(
    http: httpx.AsyncClient, method: str, path: str, content: bytes, status: int
) -> None:
    response = await http.request(method, path, content=content)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert response.headers["ekiden-request-id"].startswith("req-")


async def test_neutral_values_of_fields_that_are_not_served_pass(
    client: openai.AsyncOpenAI,
) -> None:
    await client.chat.completions.create(
        **CHAT,
        max_tokens=1,
        tools=[],
        response_format={"type": "text"},
        metadata={"a": "b"},
        extra_body={"best_of": 1, "use_beam_search": False, "guided_json": None},
    )


async def test_a_prompt_over_the_limit_is_a_400_with_both_numbers(
    http: httpx.AsyncClient, decode: FakeDecode
) -> None:
    body = {"model": MODEL, "prompt": [5] * (MAX_MODEL_LEN + 1), "max_tokens": 1}
    response = await http.post("/v1/completions", json=body)
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    assert str(MAX_MODEL_LEN + 1) in message
    assert str(MAX_MODEL_LEN) in message.replace(str(MAX_MODEL_LEN + 1), "")
    assert decode.requests == []


async def test_ids_are_ours_and_the_client_s_is_only_echoed(
    http: httpx.AsyncClient, decode: FakeDecode
) -> None:
    async def ask() -> httpx.Response:
        body = {**CHAT, "max_tokens": 4}
        return await http.post("/v1/chat/completions", json=body, headers={"x-request-id": "same"})

    first, second = await asyncio.gather(ask(), ask())
    assert first.status_code == second.status_code == 200
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"
    ids = {response.headers["ekiden-request-id"] for response in (first, second)}
    assert len(ids) == 2
    assert {request.request_id for request in decode.requests} == ids


async def test_an_error_before_the_first_token_has_its_own_status(
    http: httpx.AsyncClient, decode: FakeDecode
) -> None:
    decode.refuse_with = Overloaded("full", retry_after_s=2.5)
    response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    decode.refuse_with = BadRequest("no such thing", field="top_k")
    response = await http.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_k")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_decode_that_fails_at_once_is_an_error_at_once(
    http: httpx.AsyncClient, decode: FakeDecode, streamed: bool
) -> None:
    """Nobody waits for a prefill leg, or for a deadline, once decode has said its last word."""
    decode.refuse_with = EkidenError("a defect of ours")
    async with asyncio.timeout(1):
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": streamed})
    assert response.status_code == 500
    assert "a defect of ours" in response.json()["error"]["message"]
    await until_metric(http, "ekiden_gateway_in_flight", 0)


@pytest.mark.parametrize("seen", [0, 1])
async def test_a_replica_that_never_ends_a_request_is_named_once_its_time_is_over(
    http: httpx.AsyncClient,
    config: GatewayConfig,
    decode: FakeDecode,
    monkeypatch: pytest.MonkeyPatch,
    seen: int,
) -> None:
    monkeypatch.setattr("gateway.generation._MARGIN_S", 0.3 - config.request_timeout_s)
    decode.gate.clear()
    decode.free_tokens = seen
    response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == (200 if seen else 504)
    last = response.text.strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == DeadlineExceeded.code
    assert "d-1 did not end the request within" in error["message"]
    await decode.until(lambda: decode.cancelled)
    await until_metric(http, "ekiden_gateway_in_flight", 0)


async def test_a_replica_that_dies_in_mid_stream_ends_it_with_an_error_event(
    http: httpx.AsyncClient, decode: FakeDecode
) -> None:
    decode.gate.clear()
    decode.free_tokens = 2
    body = {**CHAT, "stream": True, "max_tokens": 20}
    lines: list[str] = []
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                lines.append(line)
            if len(lines) == 3:  # role and both tokens
                await decode.stop()
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["code"] == ReplicaFailed.code
    assert "d-1" in error["message"]
    assert not any("[DONE]" in line for line in lines)


async def test_openai_s_client_sees_a_mid_stream_failure(
    client: openai.AsyncOpenAI, decode: FakeDecode
) -> None:
    decode.gate.clear()
    decode.free_tokens = 1
    stream = await client.chat.completions.create(**CHAT, max_tokens=9, stream=True)

    async def read() -> None:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                await decode.stop()

    with pytest.raises(openai.APIError, match="d-1"):
        await read()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_before_the_first_byte_cancels_its_request(
    http: httpx.AsyncClient, live: Live, decode: FakeDecode, streamed: bool
) -> None:
    decode.gate.clear()
    body = {**CHAT, "stream": streamed}
    task = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))
    await decode.until(lambda: decode.requests)
    task.cancel()
    await decode.until(lambda: decode.cancelled)
    assert decode.cancelled == [decode.requests[0].request_id]
    await until_metric(http, "ekiden_gateway_in_flight", 0)


async def test_a_client_that_leaves_in_mid_stream_cancels_its_request_and_no_other(
    http: httpx.AsyncClient, decode: FakeDecode
) -> None:
    decode.gate.clear()
    decode.free_tokens = 1
    body = {**CHAT, "stream": True, "max_tokens": 4}
    async with http.stream("POST", "/v1/chat/completions", json=body) as other:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            await anext(response.aiter_lines())
            leaver = response.headers["ekiden-request-id"]
        await decode.until(lambda: decode.cancelled)
        assert decode.cancelled == [leaver]
        decode.gate.set()
        assert [line async for line in other.aiter_lines()][-2] == "data: [DONE]"


async def test_a_body_of_3_mb_passes_and_one_over_the_limit_is_a_413(
    config: GatewayConfig, decode: FakeDecode, redis_url: str
) -> None:
    registration = await decode.register(redis_url, max_model_len=4_000_000)
    async with (
        live_gateway(config) as live,
        httpx.AsyncClient(base_url=live.url, trust_env=False, timeout=60) as http,
    ):
        body = {"model": MODEL, "prompt": "hello world " * 250_000, "max_tokens": 1}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert len(decode.requests[-1].prompt) > 400_000

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(9):
                yield b" " * (1 << 20)

        declared = await http.post("/v1/completions", content=b" " * ((8 << 20) + 1))
        chunked = await http.post("/v1/completions", content=endless())
        for response in (declared, chunked):
            assert response.status_code == 413
            assert str(8 << 20) in response.json()["error"]["message"]
    await registration.close()


async def test_api_keys_are_checked_on_v1_only(
    config: GatewayConfig, registered: Registration
) -> None:
    import msgspec

    keyed = msgspec.structs.replace(config, api_key="k-1")
    async with live_gateway(keyed) as live, httpx.AsyncClient(trust_env=False) as http:
        for headers in ({}, {"authorization": "Bearer k-2"}, {"authorization": "k-1"}):
            refused = await http.get(f"{live.url}/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["param"]) == (401, None)
        good = await http.get(f"{live.url}/v1/models", headers={"authorization": "bearer k-1"})
        assert good.status_code == 200
        assert (await http.get(f"{live.url}/health")).status_code == 200
