"""The books of KV blocks: who owns which, which are cached, which are free.

A block is in one of three states:

- **held**: it has owners. A block in flight has two, the request and the writer (the transfer
  that fills it, or the step that uses it), and stays held until the last one has let go.
- **cached**: nobody owns it, but the prefix index knows its content. Taken back by a hit, or
  evicted, the longest unused first, when the free ones run out.
- **free**: nobody owns it and its content means nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from ekiden.cache.prefix_index import BlockKey, Parent, PrefixIndex
from ekiden.core.errors import InvariantBroken


class BlockPool:
    """Counts owners; knows nothing of what is in a block but its key. Used from one thread."""

    def __init__(self, total: int, *, caching: bool = True) -> None:
        """``total`` blocks, all free. Without ``caching`` nothing is ever indexed or found."""
        self.total = total
        self._caching = caching
        self._free: list[int] = []
        """Those that were given back, the last one first to go; then come those never used."""
        self._unused = 0
        """The first block that was never used: a large pool costs nothing before it fills."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._owners: dict[int, int] = {}
        self._index = PrefixIndex()

    @property
    def free(self) -> int:
        return len(self._free) + self.total - self._unused

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return len(self._owners)

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` could give."""
        return self.free + len(self._cached)

    @property
    def owners(self) -> Mapping[int, int]:
        """Owners of each held block."""
        return self._owners

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one owner each, or None, and nothing changed, if too few are left.

        Takes free blocks first, then evicts the longest unused cached ones.
        """
        if count > self.available:
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self._unused < self.total:
            self._unused += 1
            return self._unused - 1
        block, _ = self._cached.popitem(last=False)
        self._index.remove(block)
        return block

    def retain(self, blocks: Iterable[int]) -> None:
        """One more owner for each of ``blocks``, which are held or cached."""
        for block in blocks:
            if block in self._owners:
                self._owners[block] += 1
            elif block in self._cached:
                del self._cached[block]
                self._owners[block] = 1
            else:
                raise InvariantBroken(f"block {block} is free and cannot be retained")

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each of ``blocks``, a block table in order.

        The last blocks of a table become the first to be evicted: a prefix is worth more than
        what follows it, and is useless without what comes before.
        """
        for block in reversed(blocks):
            if block not in self._owners:
                raise InvariantBroken(f"block {block} was released but has no owner")
            self._owners[block] -= 1
            if not self._owners[block]:
                self._idle(block)

    def _idle(self, block: int) -> None:
        del self._owners[block]
        if block in self._index:
            self._cached[block] = None
        else:
            self._free.append(block)

    def find(self, root: bytes, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest known prefix of ``keys``. Only a look: nothing is retained."""
        return self._index.find(root, keys) if self._caching else []

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody owns: retaining them leaves so many less available."""
        return sum(block in self._cached for block in blocks)

    def publish(self, block: int, key: BlockKey, parent: Parent) -> int | None:
        """Let later requests find ``block``, which is held and holds ``key``'s content for good.

        Returns the parent for the block that follows, None if nothing that follows can be found.
        """
        if not self._caching:
            return None
        if block not in self._owners:
            raise InvariantBroken(f"block {block} was published but has no owner")
        return self._index.insert(block, key, parent)

    def serial(self, block: int) -> int:
        """The parent for what follows ``block``, which ``find`` returned."""
        return self._index.serial(block)

    def check_sums(self) -> None:
        """As ``check``, for the sums alone.

        Raises:
            InvariantBroken: free + cached + held is not total.
        """
        counts = (self.free, len(self._cached), len(self._owners))
        if sum(counts) != self.total:
            raise InvariantBroken(
                f"block books do not balance: free {counts[0]} + cached {counts[1]} + "
                f"held {counts[2]} is not total {self.total}"
            )

    def check(self) -> None:
        """Compare the books with each other.

        Raises:
            InvariantBroken: free + cached + held is not total, or a block is in two states.
        """
        free = {*self._free, *range(self._unused, self.total)}
        cached, held = set(self._cached), set(self._owners)
        counts = (self.free, len(cached), len(held))
        if sum(counts) != self.total or len(free | cached | held) != self.total:
            raise InvariantBroken(
                f"block books do not balance: free {counts[0]} + cached {counts[1]} + "
                f"held {counts[2]} is not total {self.total}, or a block is counted twice"
            )
        lost = [block for block in cached if block not in self._index]
        if lost:
            raise InvariantBroken(f"blocks {lost} count as cached but the index lacks them")
