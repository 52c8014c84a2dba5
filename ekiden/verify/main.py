"""Run the grid: in this process, with real processes, or both; then report."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ekiden.core.config import EngineConfig
from ekiden.text.tokenizer import Tokenizer

from .bounds import Bounds
from .cover import Tile
from .house import WIRES, House
from .layouts import Grid, Pair, sample
from .processes import ProcessesRun
from .prompts import make_prompts
from .report import Part, Progress, print_report, write_json
from .script import CHUNK_TOKENS, make_script
from .shape import Shape
from .threads import ThreadsRun
from .truth import Truths

PROCESS_CACHE_TOKENS = 10_240
"""KV of a replica: every prompt of a cell at once, with room to spare."""
THREAD_CACHE_TOKENS = 3_072
THREAD_MODEL_LEN = 512
PROCESS_MODEL_LEN = 1_024
PROCESS_CHUNK_TOKENS = 256


class VerifyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to prove, and with how much work."""

    model_dir: Path
    model_name: str
    grid: Grid
    """Run in this process, if that is asked for."""
    tiles: tuple[Tile, ...]
    """Run with real processes, if that is asked for."""
    threads: bool = False
    processes: bool = True
    sample: int = 0
    """So many cells of each part, drawn by ``seed``; 0: all."""
    seed: int = 0
    prompts: int = 20
    tokens: int = 32
    """Generated for each prompt of real processes."""
    thread_tokens: int = 9
    """Generated for each prompt in this process: the hand-off token and eight on decode."""
    thread_wire: str = WIRES[0]
    """One of ``WIRES``: what carries KV in this process."""
    dtype: str = "float32"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    """Of the replicas in this process; services of the grid with processes run on CPUs."""
    transport: str = "auto"
    cell_timeout_s: float = 180.0
    json: Path | None = None


def run(config: VerifyConfig) -> int:
    """0 when every cell is equal or refused, 1 otherwise."""
    house = House.of(_engine(config, THREAD_MODEL_LEN, CHUNK_TOKENS), config.thread_wire)
    parts = []
    if config.threads:
        parts.append(_in_process(config, house))
    if config.processes:
        parts.append(_with_processes(config, house))
    if config.json is not None:
        write_json(config.json, config.model_name, parts)
    return print_report(parts)


def _in_process(config: VerifyConfig, house: House) -> Part:
    began, progress = time.monotonic(), Progress()
    cells = sample(config.grid.cells(), config.sample, config.seed)
    shape = Shape(
        engine=_engine(config, THREAD_MODEL_LEN, CHUNK_TOKENS), cache_tokens=THREAD_CACHE_TOKENS
    )
    script = make_script(
        Tokenizer.load(config.model_dir), _block_sizes(cells), config.thread_tokens
    )
    truths = Truths(house, shape, script.prompts, script.max_tokens, progress)
    # What another TP rounds otherwise is measured where there are ranks enough.
    on_cpu = msgspec.structs.replace(
        shape, engine=msgspec.structs.replace(shape.engine, device="cpu")
    )
    bounds = Bounds(Truths(house, on_cpu, script.prompts, script.max_tokens, progress))
    grid = ThreadsRun(house, shape, script, truths, bounds, config.cell_timeout_s, progress)
    return Part(
        title=f"in one process, over {config.thread_wire}",
        results=grid.run(cells),
        seconds=time.monotonic() - began,
    )


def _with_processes(config: VerifyConfig, house: House) -> Part:
    began, progress = time.monotonic(), Progress()
    cells = sample(
        [cell for tile in config.tiles for cell in tile.cells()], config.sample, config.seed
    )
    shape = Shape(
        engine=_engine(config, PROCESS_MODEL_LEN, PROCESS_CHUNK_TOKENS),
        cache_tokens=PROCESS_CACHE_TOKENS,
    )
    prompts = make_prompts(Tokenizer.load(config.model_dir), _block_sizes(cells), config.prompts)
    named = {str(number): prompt for number, prompt in enumerate(prompts)}
    truths = Truths(house, shape, named, config.tokens, progress)
    with tempfile.TemporaryDirectory(prefix="ekiden-verify-") as folder:
        grid = ProcessesRun(
            shape,
            truths,
            Bounds(truths),
            config.transport,
            config.cell_timeout_s,
            Path(folder),
            progress,
        )
        results = asyncio.run(grid.run(config.tiles, cells))
    return Part(
        title=f"with real processes, over {config.transport}",
        results=results,
        seconds=time.monotonic() - began,
    )


def _engine(config: VerifyConfig, max_model_len: int, chunk_tokens: int) -> EngineConfig:
    return EngineConfig(
        model_dir=config.model_dir,
        model_name=config.model_name,
        dtype=config.dtype,
        device=config.device,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=chunk_tokens,
    )


def _block_sizes(cells: Sequence[Pair]) -> list[int]:
    return sorted({layout.block_size for cell in cells for layout in cell})
