"""A guess at which prefixes each replica has cached, from what was routed where.

Fed with granule hashes only, bounded for each replica, and kept under (replica, epoch): what an
earlier life had cached is never believed. A guess only orders candidates; the replica's own index
decides what is reused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

Life = tuple[str, int]
"""(replica id, epoch)."""


class PrefixGuess:
    """Least recently routed granules go first, and the end of a prompt before its head."""

    def __init__(self, *, max_granules: int = 1 << 17) -> None:
        """``max_granules`` bounds each replica: about 16 MB at the default."""
        self._max = max_granules
        self._seen: dict[Life, OrderedDict[bytes, None]] = {}

    def add(self, life: Life, granules: Sequence[bytes], *, capacity: int = 0) -> None:
        """``life`` was sent a prompt of these granules. ``capacity``: granules its pool holds."""
        seen = self._seen.setdefault(life, OrderedDict())
        bound = min(self._max, capacity) if capacity else self._max
        # Heads last, so that they are the youngest: a prompt then shrinks from its end.
        for granule in reversed(granules[:bound]):
            if granule in seen:
                seen.move_to_end(granule)
            else:
                seen[granule] = None
        while len(seen) > bound:
            seen.popitem(last=False)

    def cached(self, life: Life, granules: Sequence[bytes]) -> int:
        """How many of the first granules ``life`` probably has; O(log n)."""
        seen = self._seen.get(life)
        if not seen:
            return 0
        low, high = 0, len(granules)
        while low < high:
            middle = (low + high + 1) // 2
            if granules[middle - 1] in seen:
                low = middle
            else:
                high = middle - 1
        return low

    def keep_only(self, lives: Collection[Life]) -> None:
        """Forget every other life."""
        for life in [life for life in self._seen if life not in lives]:
            del self._seen[life]
