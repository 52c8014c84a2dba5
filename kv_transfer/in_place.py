"""Whole blocks of a cache as pieces of memory, in the order of a message: a wire that takes pieces
moves them without staging.

Legend of shapes: B blocks, H KV heads, L layers, 2 (K and V), S block size, R row.
"""

from __future__ import annotations

import torch

from ekiden.core.errors import InvariantBroken
from kv_transfer.reshard import places
from kv_transfer.staging import Slice
from kv_transfer.transports.base import Pieces

SHORTEST = 4096
"""Pieces of fewer bytes cost more apiece than the copies into staging that they save."""


class InPlace:
    """A cache [blocks, heads, layers, 2, block_size, row], as bytes."""

    def __init__(self, cache_BHL2SR: torch.Tensor) -> None:
        self._count, _, self._layers, _, self._block_size, _ = cache_BHL2SR.shape
        size = cache_BHL2SR.element_size()
        self._block, self._head, self._layer = (
            stride * size for stride in cache_BHL2SR.stride()[:3]
        )
        self._bytes: memoryview | None = None
        if cache_BHL2SR.device.type == "cpu" and cache_BHL2SR.is_contiguous():
            self._bytes = cache_BHL2SR.view(torch.uint8).numpy().data.cast("B")

    def pieces(self, part: Slice) -> Pieces | None:
        """Where ``part`` lies, or None if that is not whole blocks in pieces worth the while.

        Raises:
            InvariantBroken: a block is not in the cache.
        """
        size = self._block_size
        if self._bytes is None or any(run.tokens != size for run in part.runs):
            return None
        found: list[memoryview] = []
        spans = self._spans(part)
        if any(stop - start < SHORTEST for start, stop in spans):
            return None
        for run in part.runs:
            for block, _ in places(run, part.blocks, size):
                if not 0 <= block < self._count:
                    raise InvariantBroken(f"block {block} is not in a cache of {self._count}")
                at = block * self._block
                found += [self._bytes[at + start : at + stop] for start, stop in spans]
        return found

    def _spans(self, part: Slice) -> list[tuple[int, int]]:
        """(start, stop) in a block of what lies together of each head, or of all heads."""
        heads = range(part.heads.start, part.heads.stop)
        layers = range(part.layers.start, part.layers.stop)
        if len(layers) == self._layers:
            return [(heads.start * self._head, heads.stop * self._head)]
        first, last = layers.start * self._layer, layers.stop * self._layer
        return [(head * self._head + first, head * self._head + last) for head in heads]
