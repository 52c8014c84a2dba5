"""What makes a rank, whether it is a process or a thread: model, cache, KV port, runner."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import torch

from ekiden.cache.layout import KvLayout
from ekiden.cache.tensors import allocate_cache, allocate_shared_cache
from ekiden.core.config import EngineConfig
from ekiden.core.errors import InvariantBroken, SetupError
from ekiden.engine.feed import Feed, tokens_of
from ekiden.engine.heap import returning_freed_blocks
from ekiden.engine.plan import StepPlan, StepResult
from ekiden.engine.port import KvPort, PortContext, PortFactory
from ekiden.engine.runner import Runner
from ekiden.layers.backends.choose import Threads
from ekiden.models.config import ModelConfig
from ekiden.models.registry import load_model
from ekiden.parallel.mesh import Mesh

Progress = Callable[[int, int], None]
"""(bytes of weights read, bytes to read)."""


class Rank:
    """A rank that is ready for steps. Used from one thread."""

    def __init__(self, runner: Runner, port: KvPort | None) -> None:
        self.runner = runner
        self.feed = Feed(needs_tokens=runner.needs_tokens)
        self.endpoint = port.describe() if port else b""
        self._port = port

    def work(self, done: Callable[[StepResult], None]) -> None:
        """Do all of ``feed`` that can be done now; ``done`` gets each step's result."""
        while self.feed.ready:
            work = self.feed.take()
            if isinstance(work, StepPlan):
                result = self.runner.run(work)
                if result.sampled:
                    self.feed.tell(result.step, tokens_of(result.sampled))
                done(result)
            elif work is not None:
                self.command(work)

    def command(self, message: bytes) -> None:
        """Hand a message of the service to the KV port."""
        if self._port is None:
            raise InvariantBroken("a message came for a KV port that this rank does not have")
        self._port.command(message)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()


def open_rank(
    config: EngineConfig,
    model: ModelConfig,
    *,
    mesh: Mesh,
    layout: KvLayout,
    num_blocks: int,
    threads: Threads,
    port_factory: PortFactory | None,
    port_options: bytes,
    epoch: int,
    emit: Callable[[bytes], None],
    progress: Progress | None = None,
) -> Rank:
    """Load the model's part, allocate the cache, open the port: all that takes time.

    Raises:
        SetupError: a checkpoint that cannot be read, no memory, or no such device.
    """
    device = rank_device(config.device, mesh.rank)
    with returning_freed_blocks():
        loaded = load_model(model, config, mesh, device, progress, threads=threads)
    share = config.shared_kv and device.type == "cpu"
    cache, pool_fd = _allocate(layout, mesh.rank, num_blocks, device, share=share)
    port = None
    if port_factory is not None:
        context = PortContext(
            rank=mesh.rank, layout=layout, epoch=epoch, options=port_options, pool_fd=pool_fd
        )
        port = port_factory(cache, context, emit)
    return Rank(Runner(model=loaded, cache=cache, mesh=mesh, layout=layout, port=port), port)


def rank_device(device: str, rank: int) -> torch.device:
    """``cpu`` for every rank, or one CUDA device for each.

    Raises:
        SetupError: an unknown device, or fewer of them than ranks.
    """
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise SetupError(f"--device {device} is unknown: choose cpu or cuda")
    count = torch.cuda.device_count()
    if rank >= count:
        raise SetupError(
            f"--device cuda needs a device for each rank, and rank {rank} finds {count}: lower "
            "--tensor-parallel-size or --pipeline-parallel-size, or choose --device cpu"
        )
    return torch.device("cuda", rank)


def _allocate(
    layout: KvLayout, rank: int, num_blocks: int, device: torch.device, *, share: bool
) -> tuple[torch.Tensor, int | None]:
    """The cache, and the file it is in if it is shared."""
    try:
        if share:
            return allocate_shared_cache(layout, rank, num_blocks)
        return allocate_cache(layout, rank, num_blocks, device), None
    except (MemoryError, RuntimeError) as error:
        size = num_blocks * layout.block_bytes(rank)
        raise SetupError(
            f"rank {rank} cannot allocate {size} bytes of KV cache on {device}: lower "
            "--kv-cache-memory or --num-gpu-blocks-override"
        ) from error


def load_port_factory(path: str) -> PortFactory:
    """The factory that ``module:attribute`` names.

    Raises:
        SetupError: there is none.
    """
    module, _, attribute = path.partition(":")
    try:
        return cast("PortFactory", getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"the KV port {path!r} cannot be loaded: {error}") from error
