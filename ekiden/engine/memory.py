"""What a replica will take of memory, part by part, known before any of it is taken.

weights       counted on the model itself (``ekiden.models.held``)
KV            blocks x bytes of a block on this rank
activations   what one step of ``max_num_batched_tokens`` has alive at once, from shapes
spare         what native kernels keep of steps of other lengths, for the next ones
staging       what the KV port puts between the cache and the wire
overhead      Python, torch and their libraries; the context of a CUDA device
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ekiden.cache.layout import KvLayout
from ekiden.core.config import EngineConfig
from ekiden.engine.activations import activation_bytes, spare_bytes
from ekiden.models.config import ModelConfig

CPU_OVERHEAD = 260 << 20
"""Resident bytes of a rank process before it loads anything: measured, with the UCX transport."""

CUDA_OVERHEAD = 700 << 20
"""Bytes that a process takes of a card for its context, its kernels and cuBLAS."""

SERVICE_OVERHEAD = 250 << 20
"""Resident bytes of the process that drives the ranks: engine, gRPC, tokenizer."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank, on the host or, with a CUDA device, on the card."""

    weights: int
    kv_cache: int
    activations: int
    spare: int
    staging: int
    overhead: int

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))

    def __str__(self) -> str:
        spare = f"{show(self.spare)} spare + " if self.spare else ""
        staging = f"{show(self.staging)} staging + " if self.staging else ""
        return (
            f"{show(self.weights)} weights + {show(self.kv_cache)} KV + "
            f"{show(self.activations)} activations + {spare}{staging}{show(self.overhead)} "
            f"overhead = {show(self.total)}"
        )


def show(size: int) -> str:
    """``1.23 GiB``, or MiB below one."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def forecast(
    model: ModelConfig,
    config: EngineConfig,
    layout: KvLayout,
    num_blocks: int,
    *,
    staging: int = 0,
) -> tuple[RankMemory, ...]:
    """What every rank will hold at its peak, in order of rank.

    ``staging`` is what each rank's KV port takes of the host.

    Raises:
        SetupError: the checkpoint and the model do not belong together.
    """
    weights = _weights(model, config)
    overhead = CPU_OVERHEAD if config.device == "cpu" else CUDA_OVERHEAD
    return tuple(
        RankMemory(
            weights=weights[rank],
            kv_cache=num_blocks * layout.block_bytes(rank),
            activations=activation_bytes(model, config, layout, rank),
            spare=spare_bytes(model, config, layout, rank),
            staging=staging if config.device == "cpu" else 0,
            overhead=overhead,
        )
        for rank in range(len(layout.ranks))
    )


def least_bytes(
    model: ModelConfig, config: EngineConfig, layout: KvLayout, num_blocks: int, weights: int
) -> int:
    """What a CPU replica takes at least, service and all, told in a moment and without torch.

    ``weights`` are those of the whole model, each counted once. What is missing is what only the
    model itself can tell, what ranks hold twice, and spare memory, which fills step by step.
    """
    ranks = range(len(layout.ranks))
    kv = num_blocks * sum(layout.block_bytes(rank) for rank in ranks)
    activations = sum(activation_bytes(model, config, layout, rank) for rank in ranks)
    return weights + kv + activations + len(ranks) * CPU_OVERHEAD + SERVICE_OVERHEAD


def _weights(model: ModelConfig, config: EngineConfig) -> tuple[int, ...]:
    # Late, since both bring torch: a service imports this file long before it starts ranks.
    from ekiden.models.held import held_bytes
    from ekiden.parallel.local import local_meshes

    meshes = local_meshes(config.tensor_parallel_size, config.pipeline_parallel_size)
    return tuple(held_bytes(model, config, mesh) for mesh in meshes)


def table(ranks: Sequence[RankMemory]) -> list[str]:
    """A line for each rank, equal ones as one: ``memory of ranks 0-3: ...``."""
    lines: list[str] = []
    first = 0
    for rank in range(1, len(ranks) + 1):
        if rank == len(ranks) or ranks[rank] != ranks[first]:
            which = f"rank {first}" if rank == first + 1 else f"each of ranks {first}-{rank - 1}"
            lines.append(f"memory of {which}: {ranks[first]}")
            first = rank
    return lines
