"""Connections to Redis whose host name is looked up beside the event loop, once at a time.

The loop's own lookup cannot be given up: each try while a name server is silent would leave one
more in its few threads, for as long as the system's limit (tens of seconds), other names would
queue behind them, and the loop could not close before the last.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from aiohappyeyeballs import start_connection
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection

Addresses = list[tuple[int, int, int, str, Any]]
"""What ``socket.getaddrinfo`` gives."""

FRESH_S = 5.0
"""How long an answer is kept for the next try: a lookup may take longer than a try waits for it."""
HEAD_START_S = 0.1
"""Of an address, before the host's next one is tried as well."""


class _Lookup:
    """One question to the name server, and its answer."""

    def __init__(self) -> None:
        self.found: Future[Addresses] = Future()
        self.found.set_running_or_notify_cancel()
        self.until = float("inf")

    def ask(self, host: str, port: int) -> None:
        addresses: Addresses = []
        failure: OSError | None = None
        try:
            addresses += socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            failure = OSError(f"{host} is not known: {error}")
        self.until = time.monotonic() + FRESH_S
        if failure is None:
            self.found.set_result(addresses)
        else:
            forget(host, port, self.found)
            self.found.set_exception(failure)


_lookups: dict[tuple[str, int], _Lookup] = {}
"""Under way, or with an answer that no connection has been made of or was refused by yet."""
_lock = threading.Lock()


def lookup(host: str, port: int) -> Future[Addresses]:
    """The lookup of ``host`` that is under way or has just ended, or a new one in a thread that
    nobody waits for when the process ends. It ends in OSError if the name is not known."""
    with _lock:
        known = _lookups.get((host, port))
        if known is not None and time.monotonic() < known.until:
            return known.found
        new = _Lookup()
        threading.Thread(
            target=new.ask, args=(host, port), name=f"lookup-{host}", daemon=True
        ).start()
        _lookups[host, port] = new
    return new.found


def forget(host: str, port: int, found: Future[Addresses]) -> None:
    """The next to ask asks the name server."""
    with _lock:
        known = _lookups.get((host, port))
        if known is not None and known.found is found:
            del _lookups[host, port]


async def dial(host: str, port: int) -> socket.socket:
    """A socket that is connected to the first of the host's addresses that answers.

    Raises:
        OSError: there is none.
    """
    found = lookup(host, port)
    addresses = await asyncio.wrap_future(found)  # under way: whoever leaves cannot cancel it
    try:
        sock = await start_connection(addresses, happy_eyeballs_delay=HEAD_START_S)
    except OSError as error:
        forget(host, port, found)
        if error.errno:  # as the system says it: redis puts the address before it
            raise OSError(error.errno, os.strerror(error.errno)) from error
        raise
    forget(host, port, found)
    return sock


class _Dialled:
    """Gives the library a socket in place of a name."""

    _sock: socket.socket

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):  # type: ignore[attr-defined]
            self._sock = await dial(self.host, self.port)  # type: ignore[attr-defined]
        await super()._connect()  # type: ignore[misc]

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments = dict(super()._connection_arguments())  # type: ignore[misc]
        if "ssl" in arguments:
            arguments["server_hostname"] = arguments["host"]
        del arguments["host"], arguments["port"]
        return {**arguments, "sock": self._sock}


class PlainConnection(_Dialled, Connection):
    """``redis://``"""


class TlsConnection(_Dialled, SSLConnection):
    """``rediss://``"""


def use_dialling(pool: ConnectionPool) -> None:
    """Have ``pool`` make its connections so; those over a Unix socket have no name."""
    ours: dict[type, type] = {Connection: PlainConnection, SSLConnection: TlsConnection}
    pool.connection_class = ours.get(pool.connection_class, pool.connection_class)
