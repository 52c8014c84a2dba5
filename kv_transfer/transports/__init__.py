"""The wires KV can move over; each implements ``kv_transfer.transports.base.Transport``.

No deadlines and no sessions: a wire moves what it is told to and says what became of it.
"""

from __future__ import annotations

from ekiden.core.errors import SetupError
from kv_transfer.transports.base import Transport

TRANSPORTS = ("ucx", "memory")


def open_transport(name: str) -> Transport:
    """The wire called ``name``, imported on use.

    Raises:
        SetupError: there is no such wire, or it cannot run on this machine.
    """
    if name == "ucx":
        from kv_transfer.transports.ucx import UcxTransport

        return UcxTransport()
    if name == "memory":
        from kv_transfer.transports.memory import HUB, MemoryTransport

        return MemoryTransport(HUB)
    raise SetupError(f"--transport {name} is unknown: choose {' or '.join(TRANSPORTS)}")
