"""The fake of a wire that moves messages out of and into any memory."""

from __future__ import annotations

from kv_transfer.transports.memory import MemoryTransport


class InPlaceMemoryTransport(MemoryTransport):
    """See the module."""

    wire = "in_place_memory"
    in_place = True
