"""HTTP clients who keep books: what was asked, what came, and whether that is an honest answer.

Honest is: the right text in full; or an error that says so (a status, an error event in a stream);
or, where the gateway itself was killed or stopped, a broken connection. Anything else is a breach.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import msgspec

MODEL = "tiny"
RIGHT, ERROR, BROKEN, LEFT = "right", "error", "broken connection", "client left"
WRONG, CUT, LATE = "wrong text", "cut without a word", "no end in time"
HONEST_STATUS = {429, 500, 502, 503, 504}
_FIRST_TOKEN, _LAST_TOKEN = 3, 300


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request; ``number`` makes its prompt unlike every other one."""

    number: int
    length: int
    max_tokens: int = 8
    n: int = 1
    temperature: float = 0.0
    stream: bool = True

    @property
    def prompt(self) -> list[int]:
        rng = random.Random(f"chaos/{self.number}/{self.length}")
        return rng.choices(range(_FIRST_TOKEN, _LAST_TOKEN), k=self.length)

    def body(self, *, stream: bool | None = None) -> dict[str, Any]:
        streamed = self.stream if stream is None else stream
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.number,
            "ignore_eos": True,
            "n": self.n,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        return body


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one request."""

    kind: str = RIGHT
    status: int = 0
    detail: str = ""
    texts: dict[int, str] = {}
    finished: set[int] = set()
    fallbacks: list[str] = []
    usage: dict[str, Any] = {}
    seconds: float = 0.0

    @property
    def honest(self) -> bool:
        return self.kind in (RIGHT, ERROR, LEFT)

    @property
    def name(self) -> str:
        """For the table: how the right answer came about, or which error."""
        if self.kind == ERROR:
            return f"error {self.status}" if self.status else "error event"
        if self.kind == RIGHT and self.fallbacks:
            return f"right after {' + '.join(dict.fromkeys(self.fallbacks))}"
        return self.kind


class Client:
    """Of one gateway."""

    def __init__(self, url: str, *, limit_s: float) -> None:
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=limit_s, trust_env=False, limits=limits
        )
        self._limit_s = limit_s

    async def close(self) -> None:
        await self._http.aclose()

    async def ready(self) -> bool:
        try:
            return (await self._http.get("/ready", timeout=2.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def metric(self, name: str) -> float:
        text = (await self._http.get("/metrics", timeout=5.0)).text
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name))

    async def ask(self, ask: Ask, *, leave: asyncio.Event | None = None) -> Outcome:
        """The outcome, not yet compared with the truth. ``leave``: hang up when it is set."""
        loop, outcome = asyncio.get_running_loop(), Outcome(texts={}, finished=set(), fallbacks=[])
        began = loop.time()
        work = asyncio.ensure_future(self._ask(ask, outcome))
        left = asyncio.ensure_future((leave or asyncio.Event()).wait())
        await asyncio.wait({work, left}, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            outcome.kind = LEFT if left.done() else LATE
        left.cancel()
        work.cancel()
        await asyncio.gather(work, left, return_exceptions=True)
        outcome.seconds = loop.time() - began
        return outcome

    async def _ask(self, ask: Ask, outcome: Outcome) -> None:
        try:
            if ask.stream:
                await self._streamed(ask, outcome)
            else:
                await self._whole(ask, outcome)
        except (httpx.HTTPError, OSError) as error:
            outcome.kind, outcome.detail = BROKEN, f"{type(error).__name__}: {error}"

    async def _whole(self, ask: Ask, outcome: Outcome) -> None:
        answer = await self._http.post("/v1/completions", json=ask.body())
        outcome.status = answer.status_code
        if answer.status_code != 200:
            _refused(answer.content, outcome)
            return
        said = answer.json()
        for choice in said["choices"]:
            outcome.texts[choice["index"]] = choice["text"]
            if choice["finish_reason"] is not None:
                outcome.finished.add(choice["index"])
        _note_usage(said["usage"], outcome)

    async def _streamed(self, ask: Ask, outcome: Outcome) -> None:
        async with self._http.stream("POST", "/v1/completions", json=ask.body()) as answer:
            outcome.status = answer.status_code
            if answer.status_code != 200:
                _refused(await answer.aread(), outcome)
                return
            done = False
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if line == "data: [DONE]":
                    done = True
                elif not self._event(msgspec.json.decode(line.removeprefix("data: ")), outcome):
                    return
            if not done:
                outcome.kind, outcome.detail = CUT, "the stream ended without [DONE] or an error"

    def _event(self, event: dict[str, Any], outcome: Outcome) -> bool:
        """False at an error event, the last of its stream."""
        if "error" in event:
            outcome.kind, outcome.status = ERROR, 0
            outcome.detail = str(event["error"]["message"])
            return False
        for choice in event["choices"]:
            index = choice["index"]
            outcome.texts[index] = outcome.texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                outcome.finished.add(index)
        if event.get("usage"):
            _note_usage(event["usage"], outcome)
        return True


class Truth:
    """What a calm deployment, one process and no hand-off, answers to the same requests."""

    def __init__(self, calm: Client) -> None:
        self._calm = calm
        self._known: dict[Ask, dict[int, str]] = {}

    async def texts(self, ask: Ask) -> dict[int, str]:
        key = msgspec.structs.replace(ask, stream=False)
        if key not in self._known:
            outcome = await self._calm.ask(key)
            if outcome.kind != RIGHT or len(outcome.finished) != ask.n:
                raise AssertionError(f"the calm deployment failed on {ask}: {outcome}")
            self._known[key] = outcome.texts
        return self._known[key]

    async def judge(self, ask: Ask, outcome: Outcome) -> Outcome:
        """The outcome with what the truth says of it: also an error must not follow wrong text."""
        expected = await self.texts(ask)
        for index, text in outcome.texts.items():
            whole = outcome.kind == RIGHT
            if text != expected[index] if whole else not expected[index].startswith(text):
                outcome.kind = WRONG
                outcome.detail = f"choice {index}: {text!r} instead of {expected[index]!r}"
                return outcome
        if outcome.kind == RIGHT and len(outcome.finished) != ask.n:
            outcome.kind = CUT
            outcome.detail = f"{len(outcome.finished)} of {ask.n} choices have a finish_reason"
        return outcome


def _refused(body: bytes, outcome: Outcome) -> None:
    outcome.kind = ERROR
    try:
        outcome.detail = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        outcome.kind, outcome.detail = CUT, f"status {outcome.status} without an error: {body!r}"
        return
    if outcome.status not in HONEST_STATUS:
        outcome.kind = WRONG
        outcome.detail = f"status {outcome.status} for a request that is right: {outcome.detail}"


def _note_usage(usage: dict[str, Any], outcome: Outcome) -> None:
    outcome.usage = usage
    fallbacks = usage["ekiden"]["fallbacks"]
    outcome.fallbacks = [entry["kind"] for entry in fallbacks]
    outcome.detail = "; ".join(f"{entry['kind']}: {entry['reason']}" for entry in fallbacks)
