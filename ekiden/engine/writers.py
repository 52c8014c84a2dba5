"""Who may write into blocks, or read them, from outside of the engine."""

from __future__ import annotations

from collections.abc import Iterable

from ekiden.cache.block_pool import BlockPool


class Writers:
    """Owners of blocks beside the sequences: what a transfer touches is not free before it ends."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[int, list[int]] = {}
        self._drawn = 0

    def hold(self, blocks: list[int]) -> int:
        """Own ``blocks`` until ``done`` with the key that comes back; no key is used twice."""
        self._pool.retain(blocks)
        self._drawn += 1
        self._blocks[self._drawn] = blocks
        return self._drawn

    def done(self, key: int) -> None:
        """Let go of what was held under ``key``. Repeating it is harmless."""
        self._pool.release(self._blocks.pop(key, []))

    def held(self) -> Iterable[list[int]]:
        return self._blocks.values()
