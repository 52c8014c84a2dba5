"""Sends one request and makes a record of it. Every wait in here is under one deadline."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec

from ekiden.bench.events import BadStream
from ekiden.bench.histogram import Histogram
from ekiden.bench.http import Hangup, NoConnection, Server, Status
from ekiden.bench.reading import Reading
from ekiden.bench.record import OK, Account, Record
from ekiden.bench.wording import Wording
from ekiden.bench.workload import Ask
from ekiden.core.clock import Clock

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What of OpenAI's and vLLM's fields a server takes."""

    endpoint: str = "completions"
    ignore_eos: bool = True
    usage: bool = True
    """It takes ``stream_options``, and tells its count of tokens at the end."""
    limit_field: str = "max_tokens"
    extra: dict[str, Any] = {}
    """Fields of every body; null takes one away."""

    def body(self, model: str, text: str, output: int) -> bytes:
        fields: dict[str, Any] = {"model": model, self.limit_field: output, "stream": True}
        fields["temperature"] = 0
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = text
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.usage:
            fields["stream_options"] = {"include_usage": True}
        fields |= self.extra
        return msgspec.json.encode({k: v for k, v in fields.items() if v is not None})


class Due(NamedTuple):
    """A request that is ready to go. ``at`` is on the clock of the asker."""

    ask: Ask
    body: bytes
    at: float


class Asker:
    """Asks one server. ``began`` is the moment that records count from."""

    def __init__(
        self,
        server: Server,
        dialect: Dialect,
        *,
        model: str,
        wording: Wording,
        timeout_s: float,
        clock: Clock,
        began: float,
    ) -> None:
        self._server, self._dialect, self._model = server, dialect, model
        self._wording, self._timeout_s = wording, timeout_s
        self._clock, self._began = clock, began
        self.gaps = Histogram()
        """Of the answers that ended well."""

    def due(self, ask: Ask, at: float) -> Due:
        text = self._wording.text(ask.pieces)
        return Due(ask, self._dialect.body(self._model, text, ask.output), at)

    async def ask(self, due: Due) -> Record:
        """Never raises for what a server may do: that is a kind of error in the record."""
        reading, sent = Reading(), self._clock.now()
        error, detail = await self._outcome(due.body, reading)
        if error == OK:
            gaps = reading.gaps_histogram()
            self.gaps.merge(gaps)
        else:
            gaps = Histogram()
        return self._record(due, reading, sent, gaps, error, detail)

    async def _outcome(self, body: bytes, reading: Reading) -> tuple[str, str]:
        """The kind of error and what is known of it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._server.post(ENDPOINTS[self._dialect.endpoint], body, reading)
        except TimeoutError:
            return "timeout", f"not ended within {self._timeout_s:g} s"
        except NoConnection as error:
            return "connect", str(error)
        except Status as error:
            return f"http_{error.code}", str(error)
        except BadStream as error:
            return error.kind, str(error)
        except Hangup as error:
            if not reading.finished:
                return "disconnected", str(error)
        if not reading.events:
            return "empty", "the answer has no text"
        if not reading.finished:
            return "disconnected", "the stream ended without a reason to finish or [DONE]"
        return OK, ""

    def _record(
        self, due: Due, reading: Reading, sent: float, gaps: Histogram, error: str, detail: str
    ) -> Record:
        ended = self._clock.now() if reading.last is None or error else reading.last
        usage = reading.usage
        return Record(
            index=due.ask.number,
            asked_prompt=due.ask.prompt,
            asked_output=due.ask.output,
            scheduled_s=due.at - self._began,
            sent_s=sent - self._began,
            ended_s=ended - self._began,
            first_s=None if reading.first is None else reading.first - self._began,
            prompt_tokens=usage.prompt_tokens if usage else due.ask.prompt,
            output_tokens=usage.completion_tokens if usage else reading.events,
            counted=usage is not None,
            itl_mean_s=gaps.mean_s,
            itl_std_s=gaps.std_s,
            itl_max_s=gaps.largest_s,
            error=error,
            detail=detail,
            account=_account(reading),
        )


def _account(reading: Reading) -> Account | None:
    return None if reading.usage is None else reading.usage.account()
