"""The wires KV can move over; each implements ``kv_transfer.transports.base.Transport``.

No deadlines and no sessions: a wire moves what it is told to and says what became of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ekiden.core.errors import SetupError
from kv_transfer.description import ALL_WIRES
from kv_transfer.options import PortOptions
from kv_transfer.transports.base import Transport

logger = logging.getLogger(__name__)


def open_transports(options: PortOptions, pool_fd: int | None) -> dict[str, Transport]:
    """The wires that ``options`` names, in that order, imported on use.

    Raises:
        SetupError: there is no such wire; or one cannot run on this machine and all are needed;
            or none can run.
    """
    opened: dict[str, Transport] = {}
    missing: list[str] = []
    try:
        for name in options.transports:
            try:
                opened[name] = _open(name, options, pool_fd)
            except SetupError as error:
                if options.needs(name):
                    raise
                logger.info("KV wire %s is left out: %s", name, error.message)
                missing.append(error.message)
        if not opened:
            raise SetupError("no wire for KV can run here: " + "; ".join(missing))
    except BaseException:
        for transport in opened.values():
            transport.close()
        raise
    return opened


def _open(name: str, options: PortOptions, pool_fd: int | None) -> Transport:
    if name not in _OPENERS:
        raise SetupError(
            f"--kv-transport {name} is unknown: choose auto, or some of {', '.join(ALL_WIRES)}"
        )
    return _OPENERS[name](options, pool_fd)


def _shm(options: PortOptions, pool_fd: int | None) -> Transport:
    from kv_transfer.transports.shm import ShmTransport

    transport = ShmTransport(options.shm_folder)
    transport.share(pool_fd)
    return transport


def _ucx(options: PortOptions, pool_fd: int | None) -> Transport:
    from kv_transfer.transports.ucx import UcxTransport

    return UcxTransport()


def _tcp(options: PortOptions, pool_fd: int | None) -> Transport:
    from kv_transfer.transports.tcp import TcpTransport

    return TcpTransport(options.host, options.advertise)


def _nixl(options: PortOptions, pool_fd: int | None) -> Transport:
    from kv_transfer.transports.nixl import NixlTransport

    return NixlTransport(options.host, options.advertise)


def _memory(options: PortOptions, pool_fd: int | None) -> Transport:
    from kv_transfer.transports.memory import HUB, MemoryTransport

    return MemoryTransport(HUB)


_OPENERS: dict[str, Callable[[PortOptions, int | None], Transport]] = {
    "shm": _shm,
    "ucx": _ucx,
    "tcp": _tcp,
    "nixl": _nixl,
    "memory": _memory,
}
