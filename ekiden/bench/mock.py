"""A server whose pace is known: what a client measures of it shows how well the client measures.

It speaks enough of OpenAI's HTTP for the load generators of the field. The first token comes
``ttft_s`` after the whole body, each further one ``itl_s`` after the one before; both are kept by
moments counted from the arrival, so that lateness never adds up. A token is a word.

It keeps account of how late tokens left, so that what a client measures beyond that is the client's
own, or the machine's.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ekiden.bench.histogram import Histogram

WORD = " word"
DEFAULT_TOKENS = 16
MODEL = "mock"


class MockConfig(msgspec.Struct, frozen=True, kw_only=True):
    ttft_s: float = 0.05
    itl_s: float = 0.01
    slots: int = 0
    """Requests that are answered at once, others wait; 0: all are."""
    model: str = MODEL
    host: str = "127.0.0.1"
    port: int = 0


class Lateness:
    """Of tokens, from the moment at which they were due until they had been written."""

    def __init__(self) -> None:
        self.first, self.later = Histogram(), Histogram()

    def add(self, number: int, seconds: float) -> None:
        """Of the token of that number of its answer, from 0."""
        (self.later if number else self.first).add(seconds)

    def lines(self) -> Iterator[str]:
        """Nothing of tokens that there were not."""
        for what, found in (("first", self.first), ("later", self.later)):
            if found.count:
                p50, p99, most = (
                    f"{1000 * value:.2f}"
                    for value in (found.percentile(50), found.percentile(99), found.largest_s)
                )
                yield (
                    f"{found.count:,} {what} tokens left late by {p50} ms P50, {p99} ms P99, "
                    f"{most} ms at most"
                )


class _Body(msgspec.Struct):
    """Whatever else a client sends is let be."""

    messages: list[dict[str, Any]] = []
    prompt: Any = ""
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return max(1, self.max_completion_tokens or self.max_tokens or DEFAULT_TOKENS)

    @property
    def prompt_tokens(self) -> int:
        if isinstance(self.prompt, list) and not self.messages:
            return len(self.prompt)
        return sum(len(_text(m.get("content")).split()) for m in self.messages) or len(
            str(self.prompt).split()
        )

    def wants(self, option: str) -> bool:
        return bool((self.stream_options or {}).get(option))


def _text(content: Any) -> str:
    """A message's content may be parts."""
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


class _Shape(msgspec.Struct, frozen=True):
    """What differs between the endpoints."""

    chunk: str
    whole: str
    chat: bool

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"index": 0, **said, "finish_reason": finish}

    def answer(self, text: str) -> dict[str, Any]:
        message = {"message": {"role": "assistant", "content": text}}
        said = message if self.chat else {"text": text}
        return {"index": 0, **said, "finish_reason": "length"}


_SHAPES = {
    "/v1/chat/completions": _Shape("chat.completion.chunk", "chat.completion", chat=True),
    "/v1/completions": _Shape("text_completion", "text_completion", chat=False),
}


def app(config: MockConfig, late: Lateness) -> ASGIApp:
    """The server as an ASGI application, which adds to ``late``."""
    slots = asyncio.Semaphore(config.slots) if config.slots else None

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        shape = _SHAPES.get(scope["path"])
        if shape is None or scope["method"] != "POST":
            await _answer(send, *_plain(config, scope["path"]))
            return
        try:
            body = msgspec.json.decode(await _read(receive), type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            await _answer(send, 400, {"error": {"message": str(error)}})
            return
        arrived = asyncio.get_running_loop().time()
        if slots is None:
            await _generate(config, shape, body, arrived, send, late)
            return
        async with slots:
            arrived = asyncio.get_running_loop().time()
            await _generate(config, shape, body, arrived, send, late)

    return serve


@asynccontextmanager
async def serving(config: MockConfig, late: Lateness | None = None) -> AsyncIterator[str]:
    """The server on a socket of its own while the block lasts; its URL."""
    with socket.create_server((config.host, config.port)) as listener:
        settings = uvicorn.Config(
            app(config, late or Lateness()),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
        )
        server = uvicorn.Server(settings)
        task = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            yield f"http://{config.host}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task


async def serve(config: MockConfig, late: Lateness, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` gets the URL."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(config, late) as url:
        ready(url)
        await stop.wait()


def _plain(config: MockConfig, path: str) -> tuple[int, dict[str, Any]]:
    match path:
        case "/v1/models":
            return 200, {"object": "list", "data": [{"id": config.model, "object": "model"}]}
        case "/health" | "/metrics" | "/":
            return 200, {"status": "ok"}
    return 404, {"error": {"message": f"{path} is not served here"}}


async def _generate(
    config: MockConfig, shape: _Shape, body: _Body, arrived: float, send: Send, late: Lateness
) -> None:
    if not body.stream:
        await _until(arrived + config.ttft_s + config.itl_s * (body.tokens - 1))
        whole = {"choices": [shape.answer(WORD * body.tokens)], "usage": _usage(body, body.tokens)}
        await _answer(send, 200, _head(config, shape.whole) | whole)
        return
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    head = _head(config, shape.chunk)
    for number in range(body.tokens):
        due = arrived + config.ttft_s + config.itl_s * number
        await _until(due)
        last = number == body.tokens - 1
        chunk = head | {"choices": [shape.choice(WORD, "length" if last else None)]}
        if body.wants("continuous_usage_stats"):
            chunk["usage"] = _usage(body, number + 1)
        await _event(send, msgspec.json.encode(chunk))
        late.add(number, asyncio.get_running_loop().time() - due)
    if body.wants("include_usage"):
        end = head | {"choices": [], "usage": _usage(body, body.tokens)}
        await _event(send, msgspec.json.encode(end))
    await _event(send, b"[DONE]", more=False)


def _head(config: MockConfig, kind: str) -> dict[str, Any]:
    return {"id": "mock-1", "object": kind, "created": 0, "model": config.model}


def _usage(body: _Body, tokens: int) -> dict[str, int]:
    prompt = body.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
    }


async def _until(moment: float) -> None:
    loop = asyncio.get_running_loop()
    while (left := moment - loop.time()) > 0:
        await asyncio.sleep(left)


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _event(send: Send, data: bytes, *, more: bool = True) -> None:
    message = {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more}
    await send(message)


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})
