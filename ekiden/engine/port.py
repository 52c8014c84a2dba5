"""The small port through which a KV transport plugs into a rank. The engine knows no more.

The service names an implementation by import path (``"kv_transfer.port:open_port"``) when it
spawns the ranks; the rank process imports it and calls it once, after the cache is allocated.
Messages are opaque bytes to the engine: it carries them between the service and the port.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from ekiden.cache.layout import KvLayout

if TYPE_CHECKING:
    import torch


class PortContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a port is told when its rank starts."""

    rank: int
    layout: KvLayout
    epoch: int
    options: bytes
    """The service's settings for the port, opaque to the engine."""
    pool_fd: int | None = None
    """The file in memory that the cache is in, if another process may map it."""


class ChunkDone(msgspec.Struct, frozen=True, array_like=True):
    """Positions [0, end) of a session's prompt are now in this rank's cache at ``blocks``."""

    session: int
    end: int
    blocks: tuple[int, ...]


class KvPort(Protocol):
    """One rank's side of the KV transport. All calls come from the rank's main thread."""

    def describe(self) -> bytes:
        """This rank's endpoint, for the peer that will talk to it."""

    def command(self, message: bytes) -> None:
        """A message from the service (open, expect, abort, ...). Must not block."""

    def chunks_finished(self, chunks: Sequence[ChunkDone]) -> None:
        """A step computed KV that sessions want sent. Must not block on the network."""

    def close(self) -> None:
        """Stop the thread and the transport; pending transfers end as aborted."""


PortFactory = Callable[["torch.Tensor", PortContext, Callable[[bytes], None]], KvPort]
"""(cache [blocks, kv_heads, layers, 2, block_size, head_dim], context, emit) -> port.

``emit(message)`` may be called from the port's own thread; the message reaches the service.
"""
