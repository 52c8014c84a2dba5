"""Questions to a gateway through the ``openai`` package: chat or completion, streamed or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from openai import AsyncOpenAI
from stack import MODEL

PROMPT = (
    "In a relay race every runner covers one part of the road and then hands a sash to the next "
    "runner of the team. Tell me who runs last, and why."
)


class Reply(msgspec.Struct):
    """What came back, the same whether it was streamed or not: texts and ends by choice."""

    texts: dict[int, str]
    finishes: dict[int, str]
    usage: dict[str, Any]
    reasons: dict[int, Any] = {}
    """``stop_reason`` by choice."""
    logprobs: dict[int, Any] = {}
    """By choice: the lists of the ``logprobs`` field, all chunks joined; where it was asked for."""

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def tokens(self) -> list[str]:
        """Texts of the first choice's tokens, where ``logprobs`` was asked for."""
        told = self.logprobs[0]
        return [e["token"] for e in told["content"]] if "content" in told else told["tokens"]

    @property
    def account(self) -> dict[str, Any]:
        """Where the prompt's tokens came from and what was done another way."""
        return dict(self.usage["ekiden"])

    @property
    def counts(self) -> dict[str, Any]:
        """The usage without what differs from one run to the next."""
        return {name: value for name, value in self.usage.items() if name != "ekiden"}


@asynccontextmanager
async def openai_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100.0
    ) as client:
        yield client


async def ask(
    client: AsyncOpenAI, kind: str, *, stream: bool, prompt: str = PROMPT, **fields: Any
) -> Reply:
    """Greedy and 16 tokens long unless ``fields`` say otherwise. ``kind``: chat or completion."""
    body = {"model": MODEL, "max_tokens": 16, "temperature": 0, **fields}
    if kind == "chat":
        endpoint: Any = client.chat.completions
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        endpoint = client.completions
        body["prompt"] = prompt
    if not stream:
        return _whole(kind, await endpoint.create(**body))
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return await _joined(kind, await endpoint.create(**body))


def _whole(kind: str, answer: Any) -> Reply:
    reply = Reply({}, {}, answer.usage.model_dump())
    for choice in answer.choices:
        _add(reply, choice, choice.message.content if kind == "chat" else choice.text)
    return reply


async def _joined(kind: str, chunks: Any) -> Reply:
    reply = Reply({}, {}, {})
    async for chunk in chunks:
        for choice in chunk.choices:
            _add(reply, choice, choice.delta.content if kind == "chat" else choice.text)
        if chunk.usage:
            reply.usage = chunk.usage.model_dump()
    return reply


def _add(reply: Reply, choice: Any, text: str | None) -> None:
    """What one chunk, or the whole answer, says of a choice. A choice ends once."""
    index = choice.index
    reply.texts[index] = reply.texts.get(index, "") + (text or "")
    if choice.logprobs is not None:
        told = reply.logprobs.setdefault(index, {})
        for name, entries in choice.logprobs.model_dump().items():
            told[name] = told.get(name, []) + (entries or [])
    if choice.finish_reason:
        assert index not in reply.finishes
        reply.finishes[index] = choice.finish_reason
        reply.reasons[index] = choice.model_extra.get("stop_reason")
