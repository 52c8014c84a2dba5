"""Cells with real services in processes of their own, over a real wire.

Starting replicas is what costs. So each starts once: the prefill replicas of a tile stay up while
its decode replicas take turns, the next ones starting while the cells of this one run.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import deque
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

AHEAD = 2
"""Decode replicas that start while the cells of another one run."""
Running = tuple[Supervisor, Peer | Outcome]
"""The replica and who holds it, or the outcome of every cell that would need it."""
Starting = asyncio.Task[Running]


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
        self._starting: list[Starting] = []

    async def run(self, tiles: Sequence[Tile], cells: Sequence[Pair]) -> Results:
        """Those of the tiles' cells that are in ``cells``. Ends every replica, whatever happens."""
        wanted, results = set(cells), Results()
        try:
            for tile in tiles:
                await self._tile(tile, wanted, results)
        finally:
            for starting in self._starting:
                starting.cancel()
            await asyncio.gather(*self._starting, return_exceptions=True)
            for supervisor in list(self._alive):
                await self._end(supervisor)
        return results

    async def _tile(self, tile: Tile, wanted: set[Pair], results: Results) -> None:
        used = [(p, d) for p, d in tile.cells() if (p, d) in wanted]
        prefills = {p: self._soon("prefill", p) for p in dict.fromkeys(p for p, _ in used)}
        for layout, decode in self._in_turn(list(dict.fromkeys(d for _, d in used))):
            supervisor, running = await decode
            for prefill in [p for p, d in used if d == layout]:
                _, peer = await prefills[prefill]
                results[prefill, layout] = await self._cell(peer, running)
                self._show(f"{prefill} -> {layout}", len(results), len(wanted))
            await self._end(supervisor)
        for starting in prefills.values():
            await self._end((await starting)[0])

    def _in_turn(self, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, Starting]]:
        """Each decode replica, the next ones starting meanwhile."""
        ahead: deque[tuple[Layout, Starting]] = deque()
        for layout in layouts:
            ahead.append((layout, self._soon("decode", layout)))
            if len(ahead) > AHEAD:
                yield ahead.popleft()
        yield from ahead

    def _soon(self, role: str, layout: Layout) -> Starting:
        starting = asyncio.ensure_future(self._start(role, layout))
        self._starting.append(starting)
        return starting

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
