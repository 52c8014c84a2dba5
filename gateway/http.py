"""The few things of HTTP that the framework leaves open: bodies, leavers, ids, server-sent events.

All of it is plain ASGI: the framework's own middleware class costs a third of the throughput of
streams.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ekiden.core.errors import BadRequest, DeadlineExceeded, EkidenError, TooLarge, Unauthenticated
from ekiden.core.ids import new_request_id
from gateway.openai import errors, shapes

log = logging.getLogger(__name__)

T = TypeVar("T")

BODY_S = 60.0
"""A client that takes longer to send its body is sent away."""
CLIENT_GONE = 499
"""What a request is counted as when the client left; nobody receives it."""


class ClientGone(Exception):
    """The client closed its connection before it was answered."""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        TooLarge: it passes ``limit`` bytes; nothing more is read then.
        DeadlineExceeded: it did not come within ``BODY_S``.
        ClientGone: the client left while sending.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                parts += chunk
                if len(parts) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not come within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    if not parts:
        raise BadRequest("the body is empty: send a JSON object")
    return bytes(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than the {limit} bytes this gateway accepts (--max-body-bytes)"
    )


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; when the client leaves first, ``work`` is cancelled.

    Raises:
        ClientGone: the client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends server-sent events. A failure ends them with an error event, never with silence."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], None],
        limit_s: float,
    ) -> None:
        """``close`` is called once, however the stream ends. ``limit_s`` bounds all of it."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async with asyncio.timeout(self._limit_s):
                await unless_gone(receive, self._pump(scope["state"]))
        except ClientGone:
            scope["state"]["status"] = CLIENT_GONE
        except TimeoutError:
            log.warning("a client did not read its stream within %.0f s", self._limit_s)
        finally:
            self._close()
            await self._events.aclose()

    async def _pump(self, state: dict[str, Any]) -> None:
        """Straight to the server: what the framework wraps round a sender looks at the start only,
        and would be three coroutines more for each event.
        """
        send: Send = state["send"]
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except EkidenError as error:
            state["status"] = error.status  # for the count: the client has seen 200 already
            log.warning("%s ended in an error: %s", state["request_id"], error.message)
            await send(_last(shapes.error_event(errors.body_of(error))))
        except Exception:
            state["status"] = 500
            log.exception("%s broke", state["request_id"])
            body = errors.body(500, "internal error; the gateway's log says more")
            await send(_last(shapes.error_event(body)))
        else:
            await send(_last(b""))


def _last(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": False}


class Envelope:
    """Round everything: an id of our own on every answer, the key, the count, no traceback.

    ``Ekiden-Request-Id`` is drawn here and never taken from a client; ``x-request-id`` is sent
    back as it came, for the client's own books.
    """

    def __init__(self, app: ASGIApp, *, api_key: str, answered: Callable[[str, int], None]) -> None:
        self._app = app
        self._api_key = api_key.encode()
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state.update(request_id=new_request_id(), status=500, arrived=time.monotonic(), send=send)
        sender = _Sender(send, state, _own_headers(scope, state["request_id"]))
        try:
            self._check_key(scope)
            await self._app(scope, receive, sender)
        except Unauthenticated as error:
            await _answer(sender, error.status, errors.body_of(error))
        except Exception:
            log.exception("%s failed", state["request_id"])
            if not sender.started:
                await _answer(sender, 500, errors.body(500, "internal error"))
        finally:
            self._answered(scope["path"], state["status"])

    def _check_key(self, scope: Scope) -> None:
        if not self._api_key or not scope["path"].startswith("/v1/"):
            return
        offered = _header(scope, b"authorization")
        scheme, _, key = offered.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
            raise Unauthenticated("the API key is missing or wrong: send it as a bearer token")


class _Sender:
    """Adds our headers to the first message and remembers its status."""

    def __init__(
        self, send: Send, state: dict[str, Any], headers: list[tuple[bytes, bytes]]
    ) -> None:
        self._send, self._state, self._headers = send, state, headers
        self.started = False

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.started = True
            self._state["status"] = message["status"]
            message = {**message, "headers": [*message["headers"], *self._headers]}
        return self._send(message)


def _own_headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    headers = [(b"ekiden-request-id", request_id.encode())]
    echoed = _header(scope, b"x-request-id")
    if echoed and len(echoed) <= 256:
        headers.append((b"x-request-id", echoed))
    return headers


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send(_last(body))
