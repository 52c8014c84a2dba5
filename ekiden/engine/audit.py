"""The check that no block is leaked and none is freed too early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ekiden.cache.block_pool import BlockPool
from ekiden.core.errors import InvariantBroken
from ekiden.engine.scheduling.schedule import ScheduledChunk
from ekiden.engine.scheduling.sequence import Sequence


def audit_blocks(
    pool: BlockPool,
    sequences: Iterable[Sequence],
    chunks: Iterable[ScheduledChunk],
    writers: Iterable[list[int]],
    *,
    whole: bool = True,
) -> None:
    """Compare the owners that ``pool`` counts with all there are; a sequence may be named twice.

    ``whole``: and check every block of the pool, not only the sums.

    Owners are sequences (their table, and the source of a copy to come), submitted chunks (the
    source of their copy) and writers.

    Raises:
        InvariantBroken: the books do not balance, or a block has an owner too many or few.
    """
    if whole:
        pool.check()
    else:
        pool.check_sums()
    owners: Counter[int] = Counter()
    for sequence in {id(sequence): sequence for sequence in sequences}.values():
        owners.update(sequence.blocks)
        owners.update(sequence.copy[:1] if sequence.copy else ())
    for chunk in chunks:
        owners.update(chunk.copy[:1] if chunk.copy else ())
    for blocks in writers:
        owners.update(blocks)
    if owners != pool.owners:
        wrong = sorted(set(owners.items()) ^ set(pool.owners.items()))
        raise InvariantBroken(f"owners of blocks do not add up: (block, owners) {wrong[:8]}")
