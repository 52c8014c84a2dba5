"""The gateway over real HTTP, real gRPC and a real Redis, driven by the openai client."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_decode import MAX_MODEL_LEN, FakeDecode
from live_gateway import MODEL, Live, live_gateway, model_dir

from ekiden.core.config import GatewayConfig
from ekiden.core.errors import BadRequest, Overloaded, ReplicaFailed
from ekiden.registry.record import DRAINING, READY, UNWELL
from ekiden.registry.registration import Registration
from ekiden.text.tokenizer import Tokenizer

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello world"}]}
WAIT_S = 20.0
"""For what is about to happen; a busy machine takes its time."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return model_dir(tmp_path / "tiny")


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture
def config(directory: Path, redis_url: str) -> GatewayConfig:
    return GatewayConfig(models={MODEL: directory}, redis_url=redis_url, port=0, secret="s")


@pytest.fixture
async def decode(tokenizer: Tokenizer) -> AsyncIterator[FakeDecode]:
    fake = FakeDecode(tokenizer, secret="s")
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def registered(decode: FakeDecode, redis_url: str) -> AsyncIterator[Registration]:
    registration = await decode.register(redis_url)
    yield registration
    await registration.close()


@pytest.fixture
async def live(config: GatewayConfig, registered: Registration) -> AsyncIterator[Live]:
    async with live_gateway(config) as found:
        yield found


@pytest.fixture
async def http(live: Live) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=live.url, trust_env=False, timeout=20) as client:
        yield client


@pytest.fixture
async def client(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as found:
        yield found


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every event, ``[DONE]`` included."""
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [b if (b := block[6:]) == "[DONE]" else json.loads(b) for block in blocks]


def text_of(stream: list[Any], index: int = 0) -> str:
    choices = [c for e in stream if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


async def test_a_chat_stream_is_role_deltas_finish_usage_done(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    body = {**CHAT, "max_tokens": 3, "stream_options": {"include_usage": True}}
    stream = await events(http, "/v1/chat/completions", body)
    head = {key: stream[0][key] for key in ("id", "object", "created", "model")}
    assert head["id"].startswith("chatcmpl-")
    assert head["object"] == "chat.completion.chunk"
    prompt = tokenizer.encode("user:hello world\n", add_special_tokens=False)
    texts = [tokenizer.decode([token]) for token in prompt[:3]]

    def chunk(delta: dict[str, str], finish: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return {**head, "choices": [choice], "usage": None}

    assert stream[:-2] == [
        chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": text}) for text in texts),
        chunk({}, "length", stop_reason=None),
    ]
    assert stream[-2]["choices"] == []
    assert stream[-2]["usage"]["completion_tokens"] == 3
    assert stream[-1] == "[DONE]"


async def test_without_include_usage_no_chunk_has_usage(http: httpx.AsyncClient) -> None:
    stream = await events(http, "/v1/chat/completions", {**CHAT, "max_tokens": 2})
    assert not any("usage" in event for event in stream[:-1])


async def test_usage_says_where_every_prompt_token_came_from_and_is_equal_streamed_or_not(
    client: openai.AsyncOpenAI,
) -> None:
    whole = await client.chat.completions.create(**CHAT, max_tokens=5)
    stream = await client.chat.completions.create(
        **CHAT, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
    usage = whole.usage.model_dump()
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    ours = usage["ekiden"]
    sources = ours["sources"]
    assert sum(v for v in sources.values() if isinstance(v, int)) == usage["prompt_tokens"]
    assert sources["reason"] == "made up"
    assert ours["times"]["transfer_s"] == 0.03
    assert ours["transfer"] == {"bytes": 1234, "seconds": 0.5, "wire": "fake"}
    assert ours["fallbacks"] == [{"kind": "local_prefill", "reason": "made up too"}]
    assert (ours["prefill_replica"], ours["decode_replica"]) == ("p-1", "d-1")


async def test_continuous_usage_counts_up_to_the_final_usage(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await events(
        http, "/v1/chat/completions", {**CHAT, "max_tokens": 4, "stream_options": options}
    )
    counts = [event["usage"]["completion_tokens"] for event in stream[:-1]]
    assert counts == sorted(counts)
    assert counts[0] <= 1
    assert counts[-1] == 4


@pytest.mark.parametrize("group", [1, 3, 1000])
async def test_n_choices_streamed_equal_n_choices_whole(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, decode: FakeDecode, group: int
) -> None:
    decode.group = group
    whole = await client.chat.completions.create(**CHAT, max_tokens=9, n=3)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    stream = await events(http, "/v1/chat/completions", {**CHAT, "max_tokens": 9, "n": 3})
    assert [text_of(stream, index) for index in range(3)] == texts
    finishes = [c["finish_reason"] for e in stream[:-1] for c in e["choices"]]
    assert [f for f in finishes if f] == ["length"] * 3
    assert decode.requests[-1].sampling.n == 3


async def test_a_stop_string_over_two_tokens_is_cut_the_same_streamed_or_not(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    whole = await client.completions.create(
        model=MODEL, prompt="hello world", stop=["o w"], max_tokens=50
    )
    assert whole.choices[0].text == "hell"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == "o w"  # type: ignore[attr-defined]
    body = {"model": MODEL, "prompt": "hello world", "stop": "o w", "max_tokens": 50}
    assert text_of(await events(http, "/v1/completions", body)) == "hell"


async def test_eos_has_no_text_and_a_character_in_pieces_is_never_shown_in_halves(
    http: httpx.AsyncClient, decode: FakeDecode, tokenizer: Tokenizer
) -> None:
    (end,) = tokenizer.eos_ids
    by_bytes = {tokenizer.token_bytes(t): t for t in range(tokenizer.vocab_size)}
    decode.output = [*(by_bytes[bytes([b])] for b in "a汉👩‍👧b".encode()), end]
    stream = await events(
        http, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 99}
    )
    assert text_of(stream) == "a汉👩‍👧b"
    pieces = [c["text"] for e in stream[:-1] for c in e["choices"]]
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_token_ends_the_text_before_itself_and_is_the_reason(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("hello world", add_special_tokens=False)
    body = {"model": MODEL, "prompt": prompt, "stop_token_ids": [prompt[-1]], "max_tokens": 50}
    stream = await events(http, "/v1/completions", body)
    assert text_of(stream) == tokenizer.decode(prompt[:-1])
    last = stream[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", prompt[-1])


async def test_logprobs_have_one_entry_a_token_streamed_or_not(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    body = {**CHAT, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, "stop": "zzz"}
    whole = await client.chat.completions.create(**body)
    entries = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries is not None
    assert len(entries) == 6
    assert b"".join(bytes(e.bytes or []) for e in entries).decode() == (
        whole.choices[0].message.content
    )
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 6
    assert [round(top.logprob, 3) for top in entries[0].top_logprobs] == [-0.5, -1.5]
    stream = await events(http, "/v1/chat/completions", body)
    logprobs = [c["logprobs"] for e in stream[:-1] for c in e["choices"] if c["logprobs"]]
    streamed = [entry for part in logprobs for entry in part["content"]]
    assert streamed == [entry.model_dump() for entry in entries]


async def test_completion_logprobs_are_parallel_lists(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(
        model=MODEL, prompt="hello world", logprobs=2, max_tokens=3
    )
    found = whole.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == whole.choices[0].text
    assert found.text_offset == [0, len(found.tokens[0]), len("".join(found.tokens[:2]))]
    assert found.token_logprobs == [-0.5] * 3
    assert found.top_logprobs is not None
    assert len(found.top_logprobs[0]) == 2


async def test_every_parameter_reaches_the_replica(
    client: openai.AsyncOpenAI, decode: FakeDecode
) -> None:
    await client.chat.completions.create(
        **CHAT,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        seed=7,
        stop=["x", "y"],
        logit_bias={"5": -3},
        user="somebody",
        extra_body={
            "top_k": 11,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
        },
    )
    sampling = decode.requests[-1].sampling
    assert (sampling.seed, sampling.max_tokens, sampling.temperature) == (7, 7, 0.5)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 11, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.1, 2)
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "y"), (9,))
    assert (sampling.logit_bias, sampling.ignore_eos) == ({5: -3.0}, True)


async def test_defaults_are_what_fits_for_a_chat_sixteen_for_a_completion_and_a_drawn_seed(
    client: openai.AsyncOpenAI, decode: FakeDecode
) -> None:
    await client.completions.create(model=MODEL, prompt=[5, 6, 7])
    assert decode.requests[-1].prompt == (5, 6, 7)
    assert decode.requests[-1].sampling.max_tokens == 16
    assert decode.requests[-1].sampling.seed == 42
    decode.output = list(decode.tokenizer.eos_ids)
    await client.chat.completions.create(**CHAT)
    request = decode.requests[-1]
    assert request.sampling.max_tokens == MAX_MODEL_LEN - len(request.prompt)


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "messages"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "text"),
    ({"max_tokens": 0}, "max_tokens", ">= 1, not 0"),
    ({"temperature": "hot"}, "temperature", 'got `str` "hot"'),
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


async def metric(http: httpx.AsyncClient, name: str) -> float:
    text = (await http.get("/metrics")).text
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name)]
    return float(values[0]) if values else math.nan


async def until_metric(http: httpx.AsyncClient, name: str, value: float) -> None:
    async with asyncio.timeout(WAIT_S):
        while await metric(http, name) != value:
            await asyncio.sleep(0.02)


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
