"""Cells with real services in processes of their own, over a real wire.

Starting replicas is what costs. So each starts once: the prefill replicas of a tile stay up while
its decode replicas take turns, the next one starting while the cells of this one run.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ekiden.service.supervisor import ChildDied, NotReady, Supervisor

from .bounds import Bounds
from .cell import Peer, run_cell
from .cover import Tile
from .layouts import Layout, Pair
from .outcome import Outcome
from .replicas import Refused, start_replica
from .shape import Shape
from .threads import Results
from .truth import Truths

Running = tuple[Supervisor, Peer | Outcome]
"""The replica and who holds it, or the outcome of every cell that would need it."""


class ProcessesRun:
    """The grid of processes."""

    def __init__(
        self,
        shape: Shape,
        truths: Truths,
        bounds: Bounds,
        transport: str,
        timeout_s: float,
        folder: Path,
        show: Callable[[str, int, int], None],
    ) -> None:
        self._shape = shape
        self._truths = truths
        self._bounds = bounds
        self._transport = transport
        self._timeout_s = timeout_s
        self._folder = folder
        self._show = show
        self._alive: list[Supervisor] = []
        self._next: asyncio.Task[Running] | None = None

    async def run(self, tiles: Sequence[Tile], cells: Sequence[Pair]) -> Results:
        """Those of the tiles' cells that are in ``cells``. Ends every replica, whatever happens."""
        wanted, results = set(cells), Results()
        try:
            for tile in tiles:
                await self._tile(tile, wanted, results)
        finally:
            if self._next is not None:
                self._next.cancel()
                await asyncio.gather(self._next, return_exceptions=True)
            for supervisor in list(self._alive):
                await self._end(supervisor)
        return results

    async def _tile(self, tile: Tile, wanted: set[Pair], results: Results) -> None:
        prefills: dict[Layout, Running] = {}
        decodes = [d for d in tile.decode if any((p, d) in wanted for p in tile.prefill)]
        for layout, decode in zip(decodes, self._in_turn(decodes), strict=True):
            supervisor, running = await decode
            for prefill in tile.prefill:
                if (prefill, layout) not in wanted:
                    continue
                if prefill not in prefills:
                    prefills[prefill] = await self._start("prefill", prefill)
                outcome = await self._cell(prefills[prefill][1], running)
                results[prefill, layout] = outcome
                self._show(f"{prefill} -> {layout}", len(results), len(wanted))
            await self._end(supervisor)
        for supervisor, _ in prefills.values():
            await self._end(supervisor)

    def _in_turn(self, layouts: Sequence[Layout]) -> Iterator[asyncio.Task[Running]]:
        """Each decode replica, the next one starting as soon as this one is asked for."""
        for layout in layouts:
            started = self._next or self._start_soon(layout)
            following = layouts[layouts.index(layout) + 1 :]
            self._next = self._start_soon(following[0]) if following else None
            yield started

    def _start_soon(self, layout: Layout) -> asyncio.Task[Running]:
        return asyncio.ensure_future(self._start("decode", layout))

    async def _cell(self, prefill: Peer | Outcome, decode: Peer | Outcome) -> Outcome:
        if isinstance(prefill, Outcome):
            return prefill
        if isinstance(decode, Outcome):
            return decode
        kinds = prefill.layout.dtype, decode.layout.dtype
        references = await asyncio.to_thread(self._truths.of, *kinds)
        bound = await asyncio.to_thread(self._bounds.of, *kinds)
        salt = secrets.token_hex(8)
        return await run_cell(prefill, decode, references, bound, salt, self._timeout_s)

    async def _start(self, role: str, layout: Layout) -> Running:
        supervisor = Supervisor(self._folder)
        self._alive.append(supervisor)
        try:
            return supervisor, await start_replica(
                supervisor, self._shape, role, layout, self._transport
            )
        except Refused as refusal:
            return supervisor, Outcome(status="refused", detail=f"{role} {layout}: {refusal}")
        except (ChildDied, NotReady) as error:
            logs = "\n".join(child.tail() for child in supervisor.children)
            print(logs, file=sys.stderr)
            return supervisor, Outcome(status="failed", detail=f"{role} {layout}: {error}")

    async def _end(self, supervisor: Supervisor) -> None:
        """By SIGTERM; nothing is in flight that could make it last."""
        self._alive.remove(supervisor)
        await supervisor.close(asyncio.Event())
