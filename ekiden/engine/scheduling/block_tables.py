"""How sequences come by their blocks, share them, offer them to others and give them back."""

from __future__ import annotations

from ekiden.cache.block_pool import BlockPool
from ekiden.core.errors import InvariantBroken
from ekiden.engine.scheduling.policy import blocks_for, growth_allowance
from ekiden.engine.scheduling.queues import Queues
from ekiden.engine.scheduling.sequence import Sequence


class BlockTables:
    """The block tables of the sequences in ``queues``, over one pool."""

    def __init__(self, pool: BlockPool, queues: Queues, block_size: int) -> None:
        self.pool = pool
        self._queues = queues
        self._size = block_size

    def place(self, sequence: Sequence, spare: int = 0) -> bool:
        """Take blocks for all known tokens, cached ones first, leaving ``spare`` others.

        The last token is always computed, since its logits are needed.
        """
        size, tokens = self._size, sequence.tokens
        keys = sequence.chain.upto(tokens, len(tokens) - 1)
        hits = self.pool.find(sequence.chain.root, keys)
        fresh = blocks_for(len(tokens), size) - len(hits)
        needed = self.pool.count_cached(hits) + fresh + self.allowance(sequence)
        if self.pool.available < needed + spare:
            return False
        self.pool.retain(hits)
        sequence.blocks = hits + self._allocated(fresh)
        sequence.scheduled = sequence.computed = sequence.cached = len(hits) * size
        sequence.published = len(hits)
        sequence.parent = self.pool.serial(hits[-1]) if hits else sequence.chain.root
        return True

    def _allocated(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise InvariantBroken(f"{count} blocks were counted as available but are not")
        return blocks

    def demand(self, sequence: Sequence) -> int:
        """Blocks for the known tokens of a waiting sequence, as if nothing were cached."""
        return blocks_for(len(sequence.tokens), self._size)

    def allowance(self, sequence: Sequence) -> int:
        """Blocks to leave for growth when ``sequence`` is admitted beside what runs."""
        own = max(0, sequence.growth_left() - self.demand(sequence))
        others = (*self._queues.running, *self._queues.reserved)
        growth = [own, *(other.growth_left() for other in others)]
        return sum(growth_allowance(sequence.preemptions, left) for left in growth)

    def must_grow(self, sequence: Sequence) -> bool:
        """Whether the next position has no block yet."""
        return sequence.scheduled >= len(sequence.blocks) * self._size

    def grow(self, sequence: Sequence) -> bool:
        """Make sure the next position has a block; False where none is left."""
        while self.must_grow(sequence):
            if (blocks := self.pool.allocate(1)) is None:
                return False
            sequence.blocks += blocks
        return True

    def stretch(self, sequence: Sequence, stop: int, wanted: int) -> int:
        """Positions from ``stop`` on that can be had, ``wanted`` at most: in the last block, and in
        one more."""
        if stop + wanted > len(sequence.blocks) * self._size:
            sequence.blocks += self.pool.allocate(1) or []
        return min(wanted, len(sequence.blocks) * self._size - stop)

    def share(self, trunk: Sequence, branch: Sequence) -> bool:
        """Give ``branch`` the whole blocks of ``trunk`` and a copy, to be made, of its last one.

        False, and nothing changed, where there is no block for the copy.
        """
        whole = trunk.computed // self._size
        partial = trunk.blocks[whole:]
        target = self.pool.allocate(len(partial))
        if target is None:
            return False
        # Both ends stay owned until the step that copies was collected, whatever happens to
        # the trunk in between.
        self.pool.retain(trunk.blocks)
        branch.blocks = trunk.blocks[:whole] + target
        branch.copy = (partial[0], target[0]) if partial else None
        branch.scheduled = branch.computed = trunk.computed
        branch.published, branch.parent = trunk.published, trunk.parent
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let later requests find the whole blocks that are computed."""
        whole = sequence.computed // self._size
        if sequence.published == whole or sequence.parent is None:
            return
        keys = sequence.chain.upto(sequence.tokens, whole * self._size)
        while sequence.published < whole and sequence.parent is not None:
            index = sequence.published
            sequence.parent = self.pool.publish(
                sequence.blocks[index], keys[index], sequence.parent
            )
            sequence.published += 1

    def strip(self, sequence: Sequence) -> None:
        """Let go of everything that ``sequence`` owns."""
        if sequence.copy is not None:
            self.pool.release(sequence.copy[:1])
            sequence.copy = None
        self.pool.release(sequence.blocks)
        sequence.blocks = []
