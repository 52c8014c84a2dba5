"""The composition root: everything the gateway is made of is put together here."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.config import GatewayConfig
from ekiden.core.errors import EkidenError
from ekiden.core.ids import new_seed
from ekiden.registry.record import ReplicaRecord
from ekiden.registry.watcher import Watcher
from gateway.api import Api
from gateway.catalog import Catalog
from gateway.decode_link import DecodeLink
from gateway.fleet import Fleet
from gateway.http import Envelope
from gateway.metrics import Metrics
from gateway.openai import errors

_GENERATING = ("/v1/chat/completions", "/v1/completions")


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """The running parts: what serves HTTP, and what must be started and ended round it."""

    app: ASGIApp
    fleet: Fleet


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    *,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    seeds: Callable[[], int] = new_seed,
) -> AsyncIterator[Gateway]:
    """Everything connected and ready to serve; closed on leaving.

    Raises:
        SetupError: a model has no tokenizer, or Redis cannot be reached.
    """
    clock = clock or MonotonicClock()
    catalog = Catalog.load(config.models)
    watcher = Watcher(config.redis_url, clock=clock)

    def open_link(record: ReplicaRecord) -> DecodeLink:
        return DecodeLink(record.id, record.address, secret=config.secret)

    fleet = Fleet(watcher, open_link, clock=clock, rng=rng or random.Random())
    await watcher.start(require=True)
    try:
        await fleet.start()
        metrics = Metrics()
        api = Api(config, catalog, fleet, metrics, clock=clock, new_seed=seeds)
        yield Gateway(app=build_app(config, api, metrics), fleet=fleet)
    finally:
        await fleet.close()
        await watcher.close()


def build_app(config: GatewayConfig, api: Api, metrics: Metrics) -> ASGIApp:
    """Routes and error handlers, in the envelope."""
    app = FastAPI(title="ekiden", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_route("/v1/chat/completions", api.chat, ["POST"])
    app.add_route("/v1/completions", api.completions, ["POST"])
    app.add_route("/v1/models", api.models, ["GET"])
    app.add_route("/v1/models/{name:path}", api.model, ["GET"])
    app.add_route("/health", api.health, ["GET"])
    app.add_route("/ready", api.ready, ["GET"])
    app.add_route("/metrics", api.metrics, ["GET"])
    app.add_exception_handler(EkidenError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    known = {route.path for route in app.routes if hasattr(route, "path")}

    def answered(path: str, status: int) -> None:
        metrics.answered(path if path in known else "other", status)

    return Envelope(app, api_key=config.api_key, answered=answered)


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, EkidenError)  # what it is registered for
    return Response(
        errors.body_of(error),
        status_code=error.status,
        headers=errors.headers_of(error),
        media_type="application/json",
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # what it is registered for
    served = ", ".join((*_GENERATING, "/v1/models", "/health", "/ready", "/metrics"))
    message = {
        404: f"{request.method} {request.url.path} is not served here: choose {served}",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, str(error.detail))
    return Response(
        errors.body(error.status_code, message),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


async def _on_bug(request: Request, _error: Exception) -> Response:
    """The envelope logs it; the client gets the id to ask for."""
    request_id = request.scope["state"]["request_id"]
    message = f"internal error; the gateway's log has more under {request_id}"
    return Response(errors.body(500, message), status_code=500, media_type="application/json")
