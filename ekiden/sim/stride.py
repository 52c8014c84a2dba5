"""Many decode steps at once, where nothing else can happen: the same as one after the other.

A replica that only decodes computes the same rows step after step, until one of them ends, blocks
run out or somebody asks something of it. The scheduler would take the same decisions over and over;
``Stride`` foretells the moments and applies the steps together.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from ekiden.engine.scheduling.block_tables import BlockTables
from ekiden.engine.scheduling.policy import blocks_for
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Sequence
from ekiden.sim.costs import Costs

MOST = 512
"""Steps of a stride."""
LEAST = 2


class Stride:
    """Steps that end at ``ends``, in seconds, the first of which begins at ``begin``."""

    def __init__(self, rows: list[Sequence], begin: float, ends: list[float]) -> None:
        self.rows = rows
        self.begin = begin
        self.ends = ends

    def over_at(self, moment: float) -> int:
        """Steps that have ended by then."""
        return bisect_right(self.ends, moment)

    def seconds(self, steps: int) -> list[float]:
        """Of each of the first ``steps``."""
        starts = [self.begin, *self.ends]
        return [end - start for start, end in zip(starts, self.ends[:steps], strict=False)]


def stride(scheduler: Scheduler, costs: Costs, now: float) -> Stride | None:
    """The steps that follow if nobody interrupts; None where the next one is no plain decode step,
    or so few follow that it is not worth while. Nothing may be in flight."""
    rows = scheduler.queues.running
    limits = scheduler.limits
    if not rows or len(rows) > limits.max_num_batched_tokens or limits.micro_batches > 1:
        return None
    if any(row.remaining != 1 or row.copy or row.draft for row in rows):
        return None
    count = min(MOST, *(row.max_tokens - len(row.tokens) for row in rows))
    while count >= LEAST and _growth(rows, count, limits.block_size) > scheduler.pool.available:
        count //= 2
    if count < LEAST:
        return None
    return Stride(rows.copy(), now, _ends(rows, costs, now, count))


def advance(scheduler: Scheduler, rows: list[Sequence], steps: int, token: int) -> None:
    """Leave ``rows`` and the pool as ``steps`` decode steps would, each sampling ``token``."""
    tables = BlockTables(scheduler.pool, scheduler.queues, scheduler.limits.block_size)
    for row in rows:
        wanted = blocks_for(row.scheduled + steps, scheduler.limits.block_size) - len(row.blocks)
        if wanted > 0:
            row.blocks += scheduler.pool.allocate(wanted) or []
        row.tokens += [token] * steps
        row.scheduled += steps
        row.computed = row.scheduled
        tables.publish(row)


def _growth(rows: list[Sequence], steps: int, size: int) -> int:
    """Blocks that ``steps`` more positions of each row take."""
    return sum(max(0, blocks_for(row.scheduled + steps, size) - len(row.blocks)) for row in rows)


def _ends(rows: list[Sequence], costs: Costs, now: float, count: int) -> list[float]:
    context = sum(len(row.tokens) for row in rows)
    found = list(accumulate(costs.latencies(len(rows), context, count), initial=now))
    return found[1:]
