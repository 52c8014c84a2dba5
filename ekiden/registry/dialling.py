"""Connections to Redis whose host name is looked up beside the event loop, once at a time.

The loop's own lookup cannot be given up: each try while a name server is silent would leave one
more in its few threads, for as long as the system's limit (tens of seconds), other names would
queue behind them, and the loop could not close before the last.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection

Addresses = list[tuple[int, int, int, str, Any]]
"""What ``socket.getaddrinfo`` gives."""

_under_way: dict[tuple[str, int], Future[Addresses]] = {}
_lock = threading.Lock()


def lookup(host: str, port: int) -> Future[Addresses]:
    """The lookup of ``host`` that is under way, or a new one in a thread that nobody waits for when
    the process ends. It ends in OSError if the name is not known."""
    with _lock:
        if (known := _under_way.get((host, port))) is not None:
            return known
        found = _under_way[host, port] = Future()
    found.set_running_or_notify_cancel()
    threading.Thread(
        target=_look_up, args=(host, port, found), name=f"lookup-{host}", daemon=True
    ).start()
    return found


def _look_up(host: str, port: int, found: Future[Addresses]) -> None:
    addresses: Addresses = []
    failure: OSError | None = None
    try:
        addresses += socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        failure = OSError(f"{host} is not known: {error}")
    with _lock:
        del _under_way[host, port]
    if failure is None:
        found.set_result(addresses)
    else:
        found.set_exception(failure)


async def dial(host: str, port: int) -> socket.socket:
    """A socket that is connected to the first of the host's addresses that answers.

    Raises:
        OSError: there is none.
    """
    addresses = await asyncio.shield(asyncio.wrap_future(lookup(host, port)))
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


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
