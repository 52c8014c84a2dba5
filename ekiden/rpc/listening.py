"""Whether a server can listen on an address, told in one sentence before anything is loaded."""

from __future__ import annotations

import errno
import socket

from ekiden.core.errors import SetupError


def check_address(host: str, port: int) -> None:
    """Raise SetupError unless a server could listen on ``host:port`` now; 0 is a free port."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise cannot_listen(host, port, error) from None


def cannot_listen(host: str, port: int, error: OSError) -> SetupError:
    """The sentence for what the system said: the port is at fault, or the host is."""
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return SetupError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --port, or 0 for "
            "a free one"
        )
    return SetupError(
        f"cannot listen on {host}:{port} ({error.strerror}): --host must be an address or a name "
        "of this machine, or 0.0.0.0 for all of its addresses"
    )
