"""A server that answers every request with the same bytes, in the pieces and manner of a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(said: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": said, "finish_reason": finish}]})


DONE = b"data: [DONE]\n\n"
GOOD = text(" a") + text(" b", "length") + event({"choices": [], "usage": USAGE}) + DONE


def with_length(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def refusal(status: int, message: str = "no") -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    return with_length(body, b"HTTP/1.1 %d Sorry\r\n" % status)


class Scripted:
    """``pieces`` are sent for each request; then the connection is closed unless ``stays``."""

    def __init__(self, pieces: Sequence[bytes], *, stays: bool) -> None:
        self.pieces, self.stays = pieces, stays
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.tasks: list[asyncio.Task[Any] | None] = []
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()
        """A client closed a connection."""

    def answer(self, _body: dict[str, Any]) -> Sequence[bytes]:
        return self.pieces

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.append(asyncio.current_task())
        try:
            while body := await self._request(reader):
                self.bodies.append(body)
                self.asked.set()
                for piece in self.answer(body):
                    writer.write(piece)
                    await writer.drain()
                if not self.stays:
                    return
            self.gone.set()
        except ConnectionError:
            self.gone.set()
        except asyncio.CancelledError:
            pass  # the end of `serving`; the stream protocol would complain of it
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line
        )
        found: dict[str, Any] = json.loads(await reader.readexactly(length))
        return found


@asynccontextmanager
async def serving(scripted: Scripted) -> AsyncIterator[Scripted]:
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()
        for task in scripted.tasks:
            if task is not None:
                task.cancel()
        await asyncio.sleep(0)
