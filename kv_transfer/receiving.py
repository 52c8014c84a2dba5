"""One session that a rank receives."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer import reshard
from kv_transfer.ledger import Ledger
from kv_transfer.mapped import blocks_of, notice_bytes, read_notice
from kv_transfer.messages import OpenReceive
from kv_transfer.staging import TRAILER
from kv_transfer.transports.base import Incoming
from kv_transfer.wire import Wire


class Receiving:
    """What is known of one session, and what is still missing of it."""

    def __init__(
        self,
        order: OpenReceive,
        wire: Wire,
        pairs: dict[int, reshard.Pair],
        peers: dict[int, int],
        ledger: Ledger,
    ) -> None:
        self.order = order
        self.wire = wire
        self.pairs = pairs
        self.peers = peers
        self.ledger = ledger
        self.sources = len(order.layout.ranks)
        self.segments = reshard.segments(order.start, order.end, order.segment_tokens)
        self.missing = {
            segment * self.sources + source
            for segment in range(len(self.segments))
            for source in pairs
        }
        self.ready: deque[tuple[int, Incoming]] = deque()
        self.noticed: deque[tuple[int, int]] = deque()
        """(index, checksum of the notice) of segments that can be read from the sender's pool."""
        self.tables: dict[int, npt.NDArray[np.int64]] = {}
        """Of each source, its block table as far as notices told it."""
        self.pools: dict[int, torch.Tensor] = {}
        """Of each source, its mapped pool as blocks."""
        self.said_at = float("-inf")

    def payload(self, index: int) -> int:
        start, end = self.segments[index // self.sources]
        return self.pairs[index % self.sources].token_bytes(self.order.layout) * (end - start)

    def message_bytes(self, index: int) -> int:
        if self.wire.mapped is None:
            return self.payload(index) + TRAILER.size
        start, end = self.segments[index // self.sources]
        return notice_bytes(start, end, self.order.layout.block_size) + TRAILER.size

    def note(self, index: int, notice: memoryview, checksum: int) -> None:
        """Keep what a notice says of its sender's blocks."""
        start, end = self.segments[index // self.sources]
        size = self.order.layout.block_size
        whole = len(blocks_of(0, self.order.end, size))
        table = self.tables.setdefault(index % self.sources, np.full(whole, -1, np.int64))
        which = blocks_of(start, end, size)
        table[which.start : which.stop] = read_notice(notice)
        self.noticed.append((index, checksum))
