"""Answers in OpenAI's shapes, streamed and whole, through the openai client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from asking import CHAT, events, text_of
from fake_decode import MAX_MODEL_LEN, FakeDecode
from live_gateway import MODEL

from ekiden.text.tokenizer import Tokenizer


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
    assert ours["transfer"] == {
        "bytes": 1234,
        "seconds": 0.5,
        "wire": "fake",
        "fetched_tokens": 2,
        "fetched_bytes": 56,
    }
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
