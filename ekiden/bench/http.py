"""HTTP/1.1 for a client that must cost little: it shares a machine with what it measures.

One connection carries one request at a time and is used again. What comes is handed on at once,
with the moment at which it was read.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

from ekiden.bench.events import BadStream, Malformed
from ekiden.core.clock import Clock
from ekiden.core.errors import SetupError

CONNECT_S = 10.0
LINGER_S = 1.0
"""How long an answer's end may come after its last event before the connection is given up."""
MAX_REFUSAL = 1 << 16
"""Bytes that are kept of an answer which is no stream."""


class Hangup(Exception):
    """The server closed the connection before the answer's end. ``silent``: not a byte had come,
    and the request had just been sent."""

    def __init__(self, message: str, *, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


class NoConnection(Exception):
    """The server could not be reached."""


class Status(Exception):
    """Another status than 200, with what the body said."""

    def __init__(self, code: int, body: bytes) -> None:
        super().__init__(f"HTTP {code}: {body.decode(errors='replace')[:500]}")
        self.code, self.body = code, body


class Sink(Protocol):
    """Takes the body of an answer with status 200."""

    done: bool
    """All that matters has come; the rest may be missing."""

    def take(self, when: float, piece: bytes) -> None:
        """A piece that was read at ``when``. Raises BadStream."""


class Address:
    """Where a server is: ``http[s]://host[:port][/prefix]``, with or without ``/v1``."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise SetupError(
                f"--base-url {url} is not an HTTP address: give http://HOST:PORT or "
                "https://HOST:PORT"
            )
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.netloc = parts.netloc.rpartition("@")[2]

    @property
    def root(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}{self.prefix}"


class Server:
    """Connections to one address, kept while they may be used again."""

    def __init__(self, address: Address, *, api_key: str, clock: Clock) -> None:
        self._address = address
        self._api_key = api_key
        self._clock = clock
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def post(self, path: str, body: bytes, sink: Sink) -> None:
        """Send one request and hand its answer to ``sink``; returns when the answer has ended.

        The caller sets the deadline; what a cancelled request came over is closed.

        Raises:
            NoConnection, Hangup, Status, BadStream: as they say.
        """
        request = self._head(path, len(body)) + body
        while self._idle:
            try:
                return await self._over(self._idle.pop(), request, sink)
            except Hangup as error:
                if not error.silent:  # else it was closed while idle: no answer was begun
                    raise
        return await self._over(await self._connect(), request, sink)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets

    async def _over(self, connection: _Connection, request: bytes, sink: Sink) -> None:
        try:
            reusable = await connection.exchange(request, sink)
        except BaseException:
            connection.close()
            raise
        if reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(
            lambda: _Connection(self._clock), self._address.host, self._address.port, ssl=self._tls
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                return (await opening)[1]
        except TimeoutError:
            raise NoConnection(f"not connected within {CONNECT_S:g} s") from None
        except OSError as error:
            raise NoConnection(str(error)) from None

    def _head(self, path: str, length: int) -> bytes:
        key = f"Authorization: Bearer {self._api_key}\r\n" if self._api_key else ""
        return (
            f"POST {self._address.prefix}{path} HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\n{key}"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()


class _Connection(asyncio.Protocol):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: asyncio.Future[None] | None = None
        self._lost: Hangup | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def close(self) -> None:
        self._transport.close()

    async def exchange(self, request: bytes, sink: Sink) -> bool:
        """One request and its answer. True when another may follow."""
        if self._lost:
            raise Hangup("the idle connection was closed", silent=True)
        self._sink, self._refusal, self._began, self._reusable = sink, b"", False, False
        self._parser = httptools.HttpResponseParser(self)
        loop = asyncio.get_running_loop()
        self._ended, self._enough = loop.create_future(), loop.create_future()
        self._sent = self._clock.now()
        self._transport.write(request)
        await asyncio.wait((self._ended, self._enough), return_when=asyncio.FIRST_COMPLETED)
        if not self._ended.done():
            await asyncio.wait((self._ended,), timeout=LINGER_S)
        if not self._ended.done() or (sink.done and self._ended.exception()):
            return False
        self._ended.result()
        return self._reusable

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            return
        self._when, self._began = self._clock.now(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, BadStream) else Malformed(f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        silent = self._ended is None or (
            not self._began and self._clock.now() - self._sent < LINGER_S
        )
        self._lost = Hangup(str(error or "closed by the server"), silent=silent)
        if self._ended is not None and not self._ended.done():
            self._fail(self._lost)

    def on_body(self, piece: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._refusal = (self._refusal + piece)[:MAX_REFUSAL]
            return
        self._sink.take(self._when, piece)
        if self._sink.done and not self._enough.done():
            self._enough.set_result(None)

    def on_message_complete(self) -> None:
        assert self._ended is not None  # nothing is parsed before a request was sent
        code = self._parser.get_status_code()
        self._reusable = self._parser.should_keep_alive()
        if self._ended.done():
            return
        if code == 200:
            self._ended.set_result(None)
        else:
            self._fail(Status(code, self._refusal))

    def _fail(self, error: Exception) -> None:
        assert self._ended is not None  # as above
        if not self._ended.done():
            self._ended.set_exception(error)
        self._ended.exception()  # read it, or asyncio complains where nobody waits any more
        if not self._enough.done():
            self._enough.set_result(None)
        self._transport.close()
