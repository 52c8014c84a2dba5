"""Run the gateway until it is told to stop.

    bind port -> load tokenizers -> reach Redis -> serve -> (SIGTERM) finish what is held -> close

Exit codes: 0 after a drain, 2 when it could not be set up, 130 when interrupted before it served.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
import uvloop

from ekiden.core.config import GatewayConfig
from ekiden.core.errors import SetupError, Unavailable
from ekiden.core.logging import setup_logging
from ekiden.core.ready_file import write_ready_file
from ekiden.rpc.listening import cannot_listen
from gateway.app import open_gateway
from gateway.fleet import Fleet

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_BACKLOG = 2048
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LAST_WORDS_S = 2.0
"""After the drain's deadline: for error events to reach their clients."""


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns the process's exit code."""
    setup_logging("gateway")
    try:
        uvloop.run(_serve(config))
    except SetupError as error:
        print(f"ekiden: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before it served: nothing is held yet
        return 130
    return 0


async def _serve(config: GatewayConfig) -> None:
    listener = bind(config.host, config.port)
    address = _shown(config.host, listener.getsockname()[1])
    with listener:
        async with open_gateway(config) as gateway:
            settings = uvicorn.Config(
                gateway.app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(config.drain_grace_s + _LAST_WORDS_S) + 1,
            )
            log.info("serving %s on http://%s", ", ".join(config.models), address)
            server = _Server(settings, gateway.fleet, config.drain_grace_s)
            server.on_started = partial(_announce, config.ready_file, address)
            await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn, but a drain that runs out of time ends streams in words."""

    def __init__(self, config: uvicorn.Config, fleet: Fleet, grace_s: float) -> None:
        super().__init__(config)
        self._fleet, self._grace_s = fleet, grace_s
        self.on_started: Callable[[], None] = _nothing

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own dies of the signal after its drain; a drain is a success: exit code 0."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        """The first signal drains, the second ends at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining: up to %.0f s for what is held", self._grace_s)
        last_words = asyncio.create_task(self._end_in_words())
        try:
            await super().shutdown(sockets)
        finally:
            last_words.cancel()
            await asyncio.gather(last_words, return_exceptions=True)

    async def _end_in_words(self) -> None:
        await asyncio.sleep(self._grace_s)
        self._fleet.fail_all(
            Unavailable(f"the gateway is shutting down and waited {self._grace_s:g} s already")
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send at once.

    Raises:
        SetupError: the address cannot be bound.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it. Without it a reply waits up to 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from None
    listener.setblocking(False)
    return listener


def _nothing() -> None:
    """Until somebody wants to know."""


def _announce(ready_file: str, address: str) -> None:
    write_ready_file(ready_file, {"address": address})


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
