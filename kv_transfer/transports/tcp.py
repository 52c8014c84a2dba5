"""The reference wire: plain TCP sockets. It works wherever gRPC does.

Neither encrypted nor signed, as all wires: keep it inside of a trusted network.
"""

from __future__ import annotations

import errno
import os
import socket

from ekiden.core.errors import SetupError
from kv_transfer.transports.stream import StreamTransport

MAGIC = b"tcp"
BACKLOG = 256
UNACKNOWLEDGED_MS = 20_000
"""A connection whose bytes nobody acknowledges for so long is lost: the wire was cut."""


class TcpTransport(StreamTransport):
    """Listens on a free port of ``host``; peers dial ``advertise`` (empty: ``host``)."""

    magic = MAGIC
    in_place = True

    def __init__(self, host: str = "127.0.0.1", advertise: str = "") -> None:
        try:
            # Looked up once, here: a name server must not hold up a port's thread later.
            found = socket.getaddrinfo(advertise or host, None, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server((host, 0), family=_family(host), backlog=BACKLOG)
        except OSError as error:
            raise SetupError(
                f"the tcp wire for KV cannot use --host {host} and address {advertise or host}: "
                f"{error.strerror or error}"
            ) from error
        address = f"{found[4][0]}|{listener.getsockname()[1]}"
        super().__init__(self.magic, listener, address.encode())

    def _dial(self, address: bytes) -> socket.socket:
        host, _, port = address.decode().rpartition("|")
        sock = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
            code = sock.connect_ex((host, int(port)))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        return sock

    def _shown(self, address: bytes) -> str:
        return address.decode(errors="replace").replace("|", ":")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
