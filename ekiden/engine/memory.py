"""What a replica will take of memory, part by part, known before any of it is taken.

weights       counted on the model itself (``ekiden.models.held``)
KV            blocks x bytes of a block on this rank
activations   what one step of ``max_num_batched_tokens`` has alive at once, from shapes
staging       what the KV port puts between the cache and the wire
overhead      Python, torch and their libraries; the context of a CUDA device
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ekiden.cache.layout import DTYPE_BYTES, KvLayout
from ekiden.core.config import EngineConfig
from ekiden.models.config import ModelConfig
from ekiden.parallel.split import even_split, head_split

CPU_OVERHEAD = 260 << 20
"""Resident bytes of a rank process before it loads anything: measured, with the UCX transport."""

CUDA_OVERHEAD = 700 << 20
"""Bytes that a process takes of a card for its context, its kernels and cuBLAS."""

SERVICE_OVERHEAD = 250 << 20
"""Resident bytes of the process that drives the ranks: engine, gRPC, tokenizer."""

COLLECTIVE_SLOT = 4 << 20
"""Most bytes of one rank's slot in the shared memory of a TP group; there are two a rank."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank, on the host or, with a CUDA device, on the card."""

    weights: int
    kv_cache: int
    activations: int
    staging: int
    overhead: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.staging + self.overhead

    def __str__(self) -> str:
        staging = f"{show(self.staging)} staging + " if self.staging else ""
        return (
            f"{show(self.weights)} weights + {show(self.kv_cache)} KV + "
            f"{show(self.activations)} activations + {staging}{show(self.overhead)} overhead "
            f"= {show(self.total)}"
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
    model itself can tell: what ranks hold twice.
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


def activation_bytes(model: ModelConfig, config: EngineConfig, layout: KvLayout, rank: int) -> int:
    """Bytes alive at once in the largest step, at most: a layer's, the logits', shared memory's.

    T tokens, C hidden, Q and E widths of the queries and of q, k, v together, I inner, V columns
    of the logits, R rows of them.
    """
    place = layout.ranks[rank]
    tp, width = layout.tp, DTYPE_BYTES[model.resolve_dtype(config)]
    heads = head_split(model.num_heads, model.num_kv_heads, tp)[place.tp_rank]
    T, C = config.max_num_batched_tokens, model.hidden_size
    Q = heads.num_q * model.head_dim
    E = Q + 2 * heads.num_kv * model.head_dim
    I = _part(model.intermediate_size, tp, place.tp_rank)  # noqa: E741
    stream = 3 * T * C * width
    # Queries are rotated in float32: the product and both of its terms.
    attention = T * (E + 2 * Q) * width + 3 * T * Q * 4 + _gathered(model, config, layout, rank)
    mlp = 4 * T * I * width
    logits = _logit_bytes(model, config, layout, rank)
    return max(stream + max(attention, mlp), logits) + _shared_bytes(model, config, layout)


def _gathered(model: ModelConfig, config: EngineConfig, layout: KvLayout, rank: int) -> int:
    """One layer's keys and values of the longest sequence, as attention in plain torch wants."""
    longest = min(model.resolve_max_model_len(config), 1 << 15)
    return longest * layout.block_bytes(rank) // layout.block_size // layout.ranks[rank].num_layers


def _logit_bytes(model: ModelConfig, config: EngineConfig, layout: KvLayout, rank: int) -> int:
    """The rank's own columns; on the sampler all of them, joined, adjusted and sorted."""
    place = layout.ranks[rank]
    if place.pp_rank < layout.pp - 1:
        return 0
    rows = config.max_num_seqs * (1 + config.speculative_config.num_speculative_tokens)
    rows = min(rows, config.max_num_batched_tokens)
    part = rows * _part(model.vocab_size, layout.tp, place.tp_rank) * 4
    return part if place.tp_rank else part + 4 * rows * model.vocab_size * 4


def _shared_bytes(model: ModelConfig, config: EngineConfig, layout: KvLayout) -> int:
    """What a rank maps of the memory that CPU ranks share, once all of it has been used."""
    step = config.max_num_batched_tokens * model.hidden_size
    step *= DTYPE_BYTES[model.resolve_dtype(config)]
    slots = 2 * layout.tp * min(step, COLLECTIVE_SLOT) if layout.tp > 1 else 0
    links = 4 * layout.pp * step if layout.pp > 1 else 0
    return slots + links


def _part(total: int, parts: int, index: int) -> int:
    first, last = even_split(total, parts)[index]
    return last - first


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
