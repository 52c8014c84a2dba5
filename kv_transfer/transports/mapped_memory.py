"""The fake of a mapped wire: notices go as messages of the memory wire, with its faults, and pools
are read where they are."""

from __future__ import annotations

from ekiden.core.errors import ReplicaFailed
from kv_transfer.transports.memory import MemoryTransport


class MappedMemoryTransport(MemoryTransport):
    """See the module."""

    wire = "mapped_memory"
    _shared: memoryview | None = None

    def share_bytes(self, pool: memoryview) -> None:
        """``pool``: the bytes that peers may read."""
        self._shared = pool

    def share(self, pool_fd: int | None) -> None:
        """There is no file behind this pool."""

    def pool(self, peer: int) -> memoryview | None:
        with self._hub.lock:
            other = self._peers.get(peer)
            if not isinstance(other, MappedMemoryTransport) or other._shared is None:
                raise ReplicaFailed("the peer is lost, or does not share its KV cache")
            return other._shared.toreadonly()
