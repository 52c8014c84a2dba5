"""The handlers: from a body to a request at decode, from its deltas to an answer.

1. read and check the body (400, 413), find the model (404)
2. render, tokenise, check lengths against what the replicas take (400, or 503 without any)
3. place and submit (503); wait for the first deltas, so that an early failure has its own status
4. stream events, or collect and answer; cancel the request if the client leaves at any point
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ekiden.core.clock import Clock
from ekiden.core.config import GatewayConfig
from ekiden.core.errors import BadRequest, Overloaded
from ekiden.core.types import Delta, Request
from gateway.catalog import Catalog, ServedModel
from gateway.fleet import Fleet, Limits
from gateway.generation import Generation
from gateway.http import CLIENT_GONE, ClientGone, EventStream, read_body, unless_gone
from gateway.metrics import Metrics
from gateway.openai.answer import Answer, StreamedAnswer, WholeAnswer
from gateway.openai.schema import ChatBody, CompletionBody, parse, sampling
from gateway.openai.shapes import ChatShape, ChunkFrame, CompletionShape, Shape

_JSON = "application/json"
_LONG_BODY = 1 << 14
"""Bodies above this are rendered and tokenised on a thread, so that streams go on meanwhile."""
_STREAM_MARGIN_S = 30.0
MAX_IN_FLIGHT = 4096

Body = ChatBody | CompletionBody


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was checked and submitted."""

    body: Body
    model: ServedModel
    request: Request
    generation: Generation
    shape: Shape
    created: int


class Api:
    """HTTP handlers over a catalog and a fleet; holds no state of any request."""

    def __init__(
        self,
        config: GatewayConfig,
        catalog: Catalog,
        fleet: Fleet,
        metrics: Metrics,
        *,
        clock: Clock,
        new_seed: Callable[[], int],
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._new_seed = new_seed
        self._in_flight = 0

    async def chat(self, http: HttpRequest) -> Response:
        return await self._generate(http, ChatBody, ChatShape())

    async def completions(self, http: HttpRequest) -> Response:
        return await self._generate(http, CompletionBody, CompletionShape())

    async def models(self, _http: HttpRequest) -> Response:
        data = [self._model_card(model) for model in self._catalog]
        return _json({"object": "list", "data": data})

    async def model(self, http: HttpRequest) -> Response:
        return _json(self._model_card(self._catalog.get(http.path_params["name"])))

    async def health(self, _http: HttpRequest) -> Response:
        """200 while the process answers; what is amiss elsewhere is told in the body."""
        stale = self._fleet.stale_for_s
        return _json({"status": "ok", "registry_stale_s": round(stale, 3), "redis": not stale})

    async def ready(self, _http: HttpRequest) -> Response:
        """200 when every model can be served now, else 503 with what is missing."""
        found = {model.name: self._fleet.missing(model) for model in self._catalog}
        missing = {name: why for name, why in found.items() if why is not None}
        return _json({"ready": not missing, "missing": missing}, 503 if missing else 200)

    async def metrics(self, _http: HttpRequest) -> Response:
        text = self._metrics.render(self._fleet)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _generate(
        self, http: HttpRequest, kind: type[ChatBody] | type[CompletionBody], shape: Shape
    ) -> Response:
        try:
            data = await read_body(http, self._config.max_body_bytes)
            arrived = self._clock.now()
            if self._in_flight >= MAX_IN_FLIGHT:
                raise Overloaded(f"{MAX_IN_FLIGHT} requests are in flight already")
            return await unless_gone(http.receive, self._answer(http, data, kind, shape, arrived))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)

    async def _answer(
        self,
        http: HttpRequest,
        data: bytes,
        kind: type[ChatBody] | type[CompletionBody],
        shape: Shape,
        arrived: float,
    ) -> Response:
        job = await self._submit(http, data, kind, shape)
        close = self._opened(job)
        try:
            first = await job.generation.take()
            self._metrics.first_token(job.model.name, self._clock.now() - arrived)
            if not job.body.stream:
                return await self._whole(job, first, close)
        except BaseException:
            close()
            raise
        limit_s = self._config.request_timeout_s + _STREAM_MARGIN_S
        return EventStream(self._events(job, first), close=close, limit_s=limit_s)

    async def _whole(self, job: Job, first: list[Delta], close: Callable[[], None]) -> Response:
        answer = WholeAnswer(Answer(job.shape, job.model.tokenizer, job.request.sampling))
        answer.push(first)
        while job.generation.completion is None:
            answer.push(await job.generation.take())
        close()
        body = answer.render(
            job.generation.completion,
            request_id=job.request.request_id.removeprefix("req-"),
            created=job.created,
            model=job.model.name,
        )
        return Response(body, media_type=_JSON)

    async def _events(self, job: Job, first: list[Delta]) -> AsyncGenerator[bytes, None]:
        frame = ChunkFrame(
            job.shape,
            request_id=job.request.request_id.removeprefix("req-"),
            created=job.created,
            model=job.model.name,
        )
        answer = StreamedAnswer(
            Answer(job.shape, job.model.tokenizer, job.request.sampling),
            frame,
            prompt_tokens=len(job.request.prompt),
            include_usage=job.body.include_usage,
            continuous_usage=job.body.continuous_usage,
        )
        yield answer.opening() + answer.push(first)
        while (account := job.generation.completion) is None:
            if data := answer.push(await job.generation.take()):
                yield data
        yield answer.closing(account)

    async def _submit(
        self,
        http: HttpRequest,
        data: bytes,
        kind: type[ChatBody] | type[CompletionBody],
        shape: Shape,
    ) -> Job:
        read = self._read
        if len(data) > _LONG_BODY:
            body, model, tokens = await asyncio.to_thread(read, data, kind)
        else:
            body, model, tokens = read(data, kind)
        limits = self._fleet.limits(model)
        _check_tokens(tokens, limits, body)
        max_tokens = _max_tokens(body, len(tokens), limits.max_model_len)
        request = Request(
            request_id=http.scope["state"]["request_id"],
            model=model.name,
            prompt=tuple(tokens),
            sampling=sampling(body, seed=self._new_seed(), max_tokens=max_tokens),
            deadline_s=self._config.request_timeout_s,
        )
        return Job(
            body=body,
            model=model,
            request=request,
            generation=Generation(self._fleet, model, request, self._clock),
            shape=shape,
            created=int(time.time()),
        )

    def _read(
        self, data: bytes, kind: type[ChatBody] | type[CompletionBody]
    ) -> tuple[Body, ServedModel, list[int]]:
        if kind is ChatBody:
            chat = parse(data, ChatBody)
            model = self._catalog.get(chat.model)
            return chat, model, model.chat_tokens(chat.messages)
        body = parse(data, CompletionBody)
        model = self._catalog.get(body.model)
        prompt = body.single_prompt()
        return body, model, model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _opened(self, job: Job) -> Callable[[], None]:
        """Count the request in; the function that counts it out and lets go of the replica."""
        self._in_flight += 1
        self._metrics.in_flight.inc()
        closed = False

        def close() -> None:
            nonlocal closed
            if closed:
                return
            closed = True
            self._in_flight -= 1
            self._metrics.in_flight.dec()
            generation = job.generation
            generation.close()
            if generation.completion is not None:
                self._metrics.finished(
                    job.model.name,
                    generation.completion,
                    choices=job.request.sampling.n,
                    predicted_cached=generation.predicted_cached,
                )

        return close

    def _model_card(self, model: ServedModel) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "ekiden",
        }
        if self._fleet.missing(model) is None:
            card["max_model_len"] = self._fleet.limits(model).max_model_len
        return card


def _check_tokens(tokens: list[int], limits: Limits, body: Body) -> None:
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    if not tokens:
        raise BadRequest(f"{field} gives no tokens: send some text", field=field)
    groups = {
        field: max(tokens),
        "stop_token_ids": max(body.stop_token_ids, default=0),
        "logit_bias": max(body.biased_tokens, default=0),
    }
    for name, highest in groups.items():
        if highest >= limits.vocab_size:
            raise BadRequest(
                f"{name} names token {highest}, but ids end at {limits.vocab_size - 1}", field=name
            )


def _max_tokens(body: Body, prompt: int, limit: int) -> int:
    """The tokens the answer may have; what fits, where the client did not say.

    Raises:
        BadRequest: prompt and answer are longer than ``limit``.
    """
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    if prompt >= limit:
        raise BadRequest(
            f"the prompt has {prompt} tokens, but the model's limit is {limit} tokens for prompt "
            "and answer together: shorten the prompt",
            field=field,
        )
    asked = body.asked_tokens
    if asked is None:
        return limit - prompt
    if prompt + asked > limit:
        raise BadRequest(
            f"the prompt has {prompt} tokens and max_tokens asks for {asked}, together "
            f"{prompt + asked}, but the model's limit is {limit} tokens: ask for at most "
            f"{limit - prompt}",
            field="max_tokens",
        )
    return asked


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type=_JSON)
