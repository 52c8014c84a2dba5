"""A client that costs little, for it shares its cores with what it measures.

One thread for all requests, a parser in C (httptools), and no look at an answer until its last byte
is there. An ordinary client, a thread for each stream, took a third of what the services took.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.request import urlopen

import httptools
import uvloop

REQUEST_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0


class Sample(NamedTuple):
    """One request. Seconds; ``usage`` is the gateway's."""

    ttft: float
    total: float
    tokens: int
    usage: dict[str, Any]
    gaps: list[float]
    """Between one event with tokens and the next: the inter-token latencies."""

    @property
    def tpot(self) -> float:
        return (self.total - self.ttft) / max(1, self.tokens - 1)

    @property
    def added_by_gateway(self) -> float:
        return self.total - float(sum(self.account["times"].values()))

    @property
    def account(self) -> dict[str, Any]:
        account: dict[str, Any] = self.usage["ekiden"]
        return account


class Client:
    """Of one gateway. Its methods may be called from any thread."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("http://")
        with urlopen(f"{url}/v1/models", timeout=CONNECT_TIMEOUT_S) as answer:
            self.model = str(json.load(answer)["data"][0]["id"])
        self._idle: list[_Connection] = []
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], tokens: int) -> Future[Sample]:
        """Stream ``tokens`` tokens, greedy."""
        return asyncio.run_coroutine_threadsafe(self._ask(prompt, tokens), self._loop)

    def ask(self, prompt: list[int], tokens: int) -> Sample:
        return self.submit(prompt, tokens).result(REQUEST_TIMEOUT_S)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(CONNECT_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _hang_up(self) -> None:
        for connection in self._idle:
            await connection.hang_up()

    async def _ask(self, prompt: list[int], tokens: int) -> Sample:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = self._idle.pop() if self._idle else await self._connect()
        began = time.monotonic()
        request = json.dumps(body).encode()
        try:
            pieces = await connection.post("/v1/completions", self._address, request)
        except BaseException:
            await connection.hang_up()
            raise
        self._idle.append(connection)
        return _sample(began, pieces)

    async def _connect(self) -> _Connection:
        host, _, port = self._address.rpartition(":")
        opening = self._loop.create_connection(_Connection, host, int(port))
        return (await asyncio.wait_for(opening, CONNECT_TIMEOUT_S))[1]


@contextmanager
def client(url: str) -> Iterator[Client]:
    made = Client(url)
    try:
        yield made
    finally:
        made.close()


class _Connection(asyncio.Protocol):
    """One request at a time: the pieces of its answer's body, each with its moment of arrival."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._lost = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set_result(None)
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the gateway hung up"))

    async def post(self, path: str, host: str, body: bytes) -> list[tuple[float, bytes]]:
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._pieces: list[tuple[float, bytes]] = []
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await self._done
        return self._pieces

    async def hang_up(self) -> None:
        self._transport.close()
        await self._lost

    def on_body(self, piece: bytes) -> None:
        self._pieces.append((time.monotonic(), piece))

    def on_message_complete(self) -> None:
        if (status := self._parser.get_status_code()) == 200:
            self._done.set_result(None)
        else:
            text = b"".join(piece for _, piece in self._pieces).decode()
            self._done.set_exception(RuntimeError(f"HTTP {status}: {text}"))


def _sample(began: float, pieces: list[tuple[float, bytes]]) -> Sample:
    """Raises RuntimeError when the stream ended in an error."""
    times: list[float] = []
    usage: dict[str, Any] = {}
    for when, event in _events(pieces):
        if "error" in event:
            raise RuntimeError(f"the stream ended in {event['error']}")
        if event["choices"]:
            times.append(when)
        usage = event.get("usage") or usage
    gaps = [after - before for before, after in itertools.pairwise(times)]
    ended = pieces[-1][0] - began
    return Sample(times[0] - began, ended, usage["completion_tokens"], usage, gaps)


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Server-sent events, each with the moment at which its last byte came."""
    kept = b""
    for when, piece in pieces:
        *whole, kept = (kept + piece).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                yield when, json.loads(data)
