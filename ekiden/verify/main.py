"""Run the grid, print the table, decide the exit code."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ekiden.core.config import EngineConfig
from ekiden.service.supervisor import ChildDied, NotReady, Supervisor
from ekiden.text.tokenizer import Tokenizer

from .cell import Outcome, Peer, run_cell
from .compare import Reference
from .layouts import Grid, Layout
from .prompts import make_prompts
from .reference import reference_tokens
from .replicas import Refused, Shape, start_replica
from .report import print_report, progress

CACHE_TOKENS = 10_240
"""KV of one replica: every prompt of a cell at once, with room to spare."""


class VerifyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to prove, and with how much work."""

    model_dir: Path
    model_name: str
    grid: Grid
    prompts: int = 20
    tokens: int = 32
    dtype: str = "float32"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    transport: str = "auto"
    cell_timeout_s: float = 180.0


def run(config: VerifyConfig) -> int:
    """0 when every cell is equal or refused, 1 otherwise."""
    results = asyncio.run(_run(config))
    return print_report(config.grid, results)


async def _run(config: VerifyConfig) -> dict[tuple[Layout, Layout], Outcome]:
    shape = _shape(config)
    block = max(layout.block_size for layout in (*config.grid.prefill, *config.grid.decode))
    prompts = make_prompts(Tokenizer.load(config.model_dir), block, config.prompts)
    references = await asyncio.to_thread(
        reference_tokens,
        shape.of(Layout(), "decode"),
        prompts,
        config.tokens,
        lambda done, total: progress("one process", done, total),
    )
    with tempfile.TemporaryDirectory(prefix="ekiden-verify-") as folder:
        grid = _GridRun(config, shape, references, Path(folder))
        try:
            return await grid.run()
        finally:
            await grid.close()


def _shape(config: VerifyConfig) -> Shape:
    engine = EngineConfig(
        model_dir=config.model_dir,
        model_name=config.model_name,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=1024,
    )
    return Shape(engine=engine, cache_tokens=CACHE_TOKENS, transport=config.transport)


class _GridRun:
    """Prefill replicas stay up for the whole grid; decode replicas take turns."""

    def __init__(
        self, config: VerifyConfig, shape: Shape, references: Sequence[Reference], folder: Path
    ) -> None:
        self._config = config
        self._shape = shape
        self._references = references
        self._folder = folder
        self._prefill: dict[Layout, Peer | Outcome] = {}
        self._supervisors: list[Supervisor] = []
        self._done = 0

    async def run(self) -> dict[tuple[Layout, Layout], Outcome]:
        results: dict[tuple[Layout, Layout], Outcome] = {}
        for decode_layout in self._config.grid.decode:
            supervisor, decode = await self._start("decode", decode_layout)
            for prefill_layout in self._config.grid.prefill:
                self._show(f"{prefill_layout} -> {decode_layout}")
                results[prefill_layout, decode_layout] = await self._cell(prefill_layout, decode)
                self._done += 1
            await supervisor.close(_hurry())
        return results

    async def _cell(self, prefill_layout: Layout, decode: Peer | Outcome) -> Outcome:
        if prefill_layout not in self._prefill:
            _, self._prefill[prefill_layout] = await self._start("prefill", prefill_layout)
        prefill = self._prefill[prefill_layout]
        if isinstance(prefill, Outcome):
            return prefill
        if isinstance(decode, Outcome):
            return decode
        return await run_cell(
            prefill, decode, self._references, secrets.token_hex(8), self._config.cell_timeout_s
        )

    async def _start(self, role: str, layout: Layout) -> tuple[Supervisor, Peer | Outcome]:
        """The running replica, or the outcome of every cell that would need it."""
        supervisor = Supervisor(self._folder)
        self._supervisors.append(supervisor)
        self._show(f"starting {role} {layout}")
        try:
            return supervisor, await start_replica(
                supervisor, self._shape, role, layout, lambda: None
            )
        except Refused as refusal:
            return supervisor, Outcome(status="refused", detail=f"{role} {layout}: {refusal}")
        except (ChildDied, NotReady) as error:
            logs = "\n".join(child.tail() for child in supervisor.children)
            print(logs, file=sys.stderr)
            return supervisor, Outcome(status="failed", detail=f"{role} {layout}: {error}")

    def _show(self, what: str) -> None:
        progress(what, self._done, len(self._config.grid.cells()))

    async def close(self) -> None:
        for supervisor in self._supervisors:
            await supervisor.close(_hurry())


def _hurry() -> asyncio.Event:
    """Nothing is in flight that deserves a grace."""
    return asyncio.Event()
