"""A gRPC server as every service runs it: health, reflection, authentication, drain."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from ekiden.core.errors import EkidenError, SetupError
from ekiden.rpc.channel import MAX_MESSAGE_BYTES, keepalive
from ekiden.rpc.listening import check_address

_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share its calls at random.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    *keepalive(),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)

_STATUS: dict[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.OUT_OF_RANGE,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    502: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

Handler = Any
"""grpc.RpcMethodHandler; grpc-stubs types it per method."""


if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class _Authenticator(_Interceptor):
    """Refuses calls without the secret; health and reflection stay open for probes."""

    def __init__(self, secret: str) -> None:
        self._expected = f"Bearer {secret}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if handler_call_details.method.startswith("/grpc."):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        offered = metadata.get("authorization", "")
        offered_bytes = offered if isinstance(offered, bytes) else offered.encode()
        if hmac.compare_digest(offered_bytes, self._expected):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_deny)


async def _deny(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the service secret is missing or wrong: set the same EKIDEN_SECRET on every service",
    )


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: EkidenError) -> NoReturn:
    """End a call with the status that belongs to the error's class."""
    code = _STATUS.get(error.status, grpc.StatusCode.INTERNAL)
    if isinstance(error, SetupError):
        code = grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, error.message)


class RpcServer:
    """Binds at once, so that a port in use is told before a model loads; serves after start()."""

    def __init__(self, host: str, port: int, *, secret: str = "") -> None:
        """Bind ``host:port``; port 0 draws a free one.

        Raises:
            SetupError: the port cannot be bound.
        """
        check_address(host, port)  # gRPC's own failure does not say why
        interceptors = [_Authenticator(secret)] if secret else []
        self.raw = grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.raw)
        try:
            self.port: int = self.raw.add_insecure_port(f"{_bracketed(host)}:{port}")
        except RuntimeError as error:
            raise SetupError(f"cannot listen on {host}:{port}: choose another --port") from error
        self._services: Sequence[str] = ()

    async def start(self, services: Sequence[str]) -> None:
        """Serve; ``services`` are the full names whose health is reported and reflected."""
        self._services = ("", *services)
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self.raw)
        await self.set_serving(True)
        await self.raw.start()

    async def set_serving(self, serving: bool) -> None:
        """What the standard health service answers for every service."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if serving else status.NOT_SERVING
        for name in self._services:
            await self._health.set(name, value)

    async def stop(self, grace_s: float) -> None:
        await self.raw.stop(grace_s)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def advertised_address(host: str, port: int, advertise: str, redis_url: str) -> str:
    """The HOST:PORT that peers dial.

    A wildcard bind address is never advertised (a peer would dial itself): the address of the
    interface that faces Redis is taken instead.

    Raises:
        SetupError: the host is a wildcard and nothing tells which interface peers can reach.
    """
    if advertise:
        name, _, given = advertise.rpartition(":")
        if not name:
            return f"{advertise}:{port}"
        return f"{name}:{given if given != '0' else port}"
    if host not in ("0.0.0.0", "::", ""):
        return f"{_bracketed(host)}:{port}"
    return f"{_bracketed(_facing(redis_url, host))}:{port}"


def _facing(redis_url: str, host: str) -> str:
    target = urlsplit(redis_url)
    try:
        if not target.hostname:
            raise OSError("no Redis URL")
        family, kind, _, _, address = socket.getaddrinfo(
            target.hostname, target.port or 6379, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: a datagram socket only picks its route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SetupError(
            f"--host {host or '0.0.0.0'} cannot be dialled by peers and no route to Redis tells "
            "which interface to use: pass --advertise HOST:PORT"
        ) from error
