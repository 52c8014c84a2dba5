"""Every pair of a grid in this process: ranks are threads, KV goes over the ``memory`` wire.

Decode replicas take turns. Prefill replicas stay open, as many as memory allows, and keep the KV
of the prompts that all pairs share: then a pair costs its transfers and its decode steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ekiden.core.errors import EkidenError, SetupError
from kv_transfer.compat import check_pair

from .bounds import Bounds
from .house import House, quiet_threads
from .inline import InlineReplica
from .layouts import Layout, Pair
from .outcome import Outcome
from .pair import Work, run_pair
from .script import Script
from .shape import Shape
from .truth import Truths

OPEN_BYTES = 6 << 30
"""Weights and KV of the prefill replicas that are open at once."""

Results = dict[Pair, Outcome]


class ThreadsRun:
    """The in-process grid."""

    def __init__(
        self,
        house: House,
        shape: Shape,
        script: Script,
        truths: Truths,
        bounds: Bounds,
        timeout_s: float,
        show: Callable[[str, int, int], None],
    ) -> None:
        self._house = house
        self._shape = shape
        self._script = script
        self._truths = truths
        self._bounds = bounds
        self._timeout_s = timeout_s
        self._show = show
        self._prefill: OrderedDict[Layout, InlineReplica | Outcome] = OrderedDict()

    def run(self, cells: Sequence[Pair]) -> Results:
        """All cells, decode layout by decode layout."""
        results: Results = {}
        by_decode: dict[Layout, list[Pair]] = {}
        for cell in cells:
            by_decode.setdefault(cell[1], []).append(cell)
        with quiet_threads():
            try:
                for layout, group in by_decode.items():
                    self._decode_turn(layout, group, results, len(cells))
            finally:
                for layout in list(self._prefill):
                    self._close_prefill(layout)
        return results

    def _decode_turn(
        self, layout: Layout, cells: Sequence[Pair], results: Results, total: int
    ) -> None:
        decode: InlineReplica | Outcome | None = None
        try:
            for cell in cells:
                if reason := self._refusal(cell):
                    results[cell] = Outcome(status="refused", detail=reason)
                else:
                    if decode is None:
                        decode = self._open(layout, "decode")
                    results[cell] = self._cell(cell, decode, f"pair {len(results)}")
                    decode = self._unless_broken(decode, results[cell])
                self._show(f"{cell[0]} -> {cell[1]}", len(results), total)
        finally:
            if isinstance(decode, InlineReplica):
                decode.close()

    def _unless_broken(
        self, decode: InlineReplica | Outcome, outcome: Outcome
    ) -> InlineReplica | Outcome | None:
        """What is left of a failed hand-off must not meet the next one: open decode anew."""
        if outcome.ok or isinstance(decode, Outcome):
            return decode
        decode.close()
        return None

    def _refusal(self, cell: Pair) -> str:
        """Why the two cannot work together, in one sentence; empty if they can."""
        try:
            prefill, decode = (
                self._house.describe(self._shape.of(layout, role), role, str(layout))
                for layout, role in zip(cell, ("prefill", "decode"), strict=True)
            )
            check_pair(prefill, decode)
        except SetupError as error:
            return error.message
        return ""

    def _cell(self, cell: Pair, decode: InlineReplica | Outcome, salt: str) -> Outcome:
        prefill = self._prefill_of(cell[0])
        if isinstance(prefill, Outcome):
            return prefill
        if isinstance(decode, Outcome):
            return decode
        kinds = prefill.layout.dtype, decode.layout.dtype
        work = Work(
            script=self._script,
            names=self._script.names(*cell),
            references=self._truths.of(*kinds),
            bound=self._bounds.of(*kinds),
            salt=salt,
            timeout_s=self._timeout_s,
        )
        outcome = run_pair(prefill, decode, work, self._house.clock)
        if not outcome.ok:
            self._close_prefill(cell[0])
        return outcome

    def _prefill_of(self, layout: Layout) -> InlineReplica | Outcome:
        if layout not in self._prefill:
            self._prefill[layout] = self._open(layout, "prefill")
            self._make_room()
        self._prefill.move_to_end(layout)
        return self._prefill[layout]

    def _make_room(self) -> None:
        while len(self._prefill) > 1 and self._open_bytes() > OPEN_BYTES:
            self._close_prefill(next(iter(self._prefill)))

    def _open_bytes(self) -> int:
        return sum(r.footprint for r in self._prefill.values() if isinstance(r, InlineReplica))

    def _close_prefill(self, layout: Layout) -> None:
        replica = self._prefill.pop(layout)
        if isinstance(replica, InlineReplica):
            replica.close()

    def _open(self, layout: Layout, role: str) -> InlineReplica | Outcome:
        """The replica, or the outcome of every cell that would need it."""
        try:
            return InlineReplica(self._house, self._shape.of(layout, role), role, str(layout))
        except EkidenError as error:
            return Outcome(status="failed", detail=f"{role} {layout}: {error.message}")
