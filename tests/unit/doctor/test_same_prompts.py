"""The same prompts to two servers: how often they go on alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ekiden.core.errors import SetupError
from ekiden.doctor import same_prompts

OURS, THEIRS = "http://ours", "http://theirs"
Answer = Callable[[httpx.Request], httpx.Response]


def serve(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[httpx.Request]:
    """Both servers are ``answer``; the requests that came."""
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": f"model of {request.url.host}"}]})
        return answer(request)

    real = httpx.AsyncClient

    def client(**more: Any) -> httpx.AsyncClient:
        return real(transport=httpx.MockTransport(handle), headers=more.get("headers"))

    monkeypatch.setattr(httpx, "AsyncClient", client)
    return asked


def text(choice: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"text": choice}]})


async def test_equal_answers_are_counted_prompt_by_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        return text("x" if request.url.host == "ours" and len(prompt) % 2 else "y")

    asked = serve(monkeypatch, answer)
    found = await same_prompts.compare(OURS, THEIRS, "key")
    prompts = list(same_prompts.prompts())
    assert found.asked == len(prompts) > 50
    assert found.equal == sum(len(prompt) % 2 == 0 for prompt in prompts)
    assert found.against == THEIRS
    assert {request.headers["authorization"] for request in asked} == {"Bearer key"}
    bodies = [json.loads(r.content) for r in asked if r.method == "POST"]
    assert {(b["max_tokens"], b["temperature"]) for b in bodies} == {(1, 0)}
    assert {b["model"] for b in bodies} == {"model of ours", "model of theirs"}


async def test_a_server_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503) if request.url.host == "theirs" else text("y")

    serve(monkeypatch, answer)
    with pytest.raises(SetupError, match=r"http://theirs/v1/completions: .*503"):
        await same_prompts.compare(OURS, THEIRS, "")
