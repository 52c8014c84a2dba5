"""Block tables on their way to the ranks: only what a rank does not have yet.

A decode row's table is the one of the step before, with a new block now and then; sent whole, 32
rows of 4,096 tokens are 27 kB a step, and reading them keeps a rank from its work for 0.3 ms. Both
ends keep the tables of the sequences that were in the last steps, by the same rule: they see the
same plans in the same order.
"""

from __future__ import annotations

import msgspec

from ekiden.core.errors import InvariantBroken
from ekiden.engine.plan import Chunk, StepPlan

FORGET_STEPS = 256
"""A sequence that was in none of so many steps is forgotten, and sent whole when it comes back."""

Table = tuple[int, ...]


class _Tables:
    """The tables that both ends know of. Used from one thread."""

    def __init__(self) -> None:
        self._tables: dict[int, Table] = {}
        self._before: dict[int, Table] = {}
        """Those that were not in a step since the last time some were forgotten."""
        self._steps = 0

    def get(self, sequence: int) -> Table:
        table = self._tables.get(sequence)
        return self._before.get(sequence, ()) if table is None else table

    def put(self, sequence: int, table: Table) -> None:
        self._tables[sequence] = table

    def step_over(self) -> None:
        self._steps += 1
        if self._steps % FORGET_STEPS == 0:
            self._before, self._tables = self._tables, {}


class TablePacker:
    """The driver's end."""

    def __init__(self) -> None:
        self._tables = _Tables()

    def pack(self, plan: StepPlan) -> tuple[StepPlan, tuple[int, ...]]:
        """(``plan`` without the blocks that the ranks have, how many of each chunk those are)."""
        pairs = [self._packed(chunk) for chunk in plan.chunks]
        self._tables.step_over()
        chunks = tuple(chunk for chunk, _ in pairs)
        return msgspec.structs.replace(plan, chunks=chunks), tuple(kept for _, kept in pairs)

    def _packed(self, chunk: Chunk) -> tuple[Chunk, int]:
        old, new = self._tables.get(chunk.sequence), chunk.blocks
        self._tables.put(chunk.sequence, new)
        kept = min(len(old), len(new))
        if old[:kept] != new[:kept]:
            kept = 0  # It was preempted and has other blocks now.
        return msgspec.structs.replace(chunk, blocks=new[kept:]), kept


class TableReader:
    """A rank's end."""

    def __init__(self) -> None:
        self._tables = _Tables()

    def unpack(self, plan: StepPlan, kept: tuple[int, ...]) -> StepPlan:
        """The plan that was packed.

        Raises:
            InvariantBroken: blocks are left out that this rank does not have.
        """
        chunks = tuple(
            self._unpacked(chunk, count) for chunk, count in zip(plan.chunks, kept, strict=True)
        )
        self._tables.step_over()
        return msgspec.structs.replace(plan, chunks=chunks)

    def _unpacked(self, chunk: Chunk, kept: int) -> Chunk:
        old = self._tables.get(chunk.sequence)
        if len(old) < kept:
            raise InvariantBroken(
                f"sequence {chunk.sequence} goes on from {kept} blocks, and {len(old)} are known"
            )
        table = old if kept == len(old) and not chunk.blocks else old[:kept] + chunk.blocks
        self._tables.put(chunk.sequence, table)
        return msgspec.structs.replace(chunk, blocks=table)
