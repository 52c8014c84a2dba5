"""How many KV blocks and threads a replica gets: decided once, in the driver. No torch."""

from __future__ import annotations

import os

from ekiden.cache.layout import KvLayout
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.models.config import ModelConfig


def resolve_num_blocks(model: ModelConfig, config: EngineConfig, layout: KvLayout) -> int:
    """KV blocks of every rank: the override, or what ``kv_cache_memory_bytes`` buys.

    Raises:
        SetupError: they do not hold one sequence of max_model_len; the message gives the
            numbers and the options to change.
    """
    block_bytes = layout.token_bytes() * layout.block_size
    blocks = config.num_gpu_blocks_override or config.kv_cache_memory_bytes // block_bytes
    longest = model.resolve_max_model_len(config)
    needed = -(-longest // layout.block_size)
    if blocks >= needed:
        return blocks
    room = blocks * layout.block_size
    shorter = f"lower --max-model-len to at most {room}, or " if room else ""
    if config.num_gpu_blocks_override:
        raise SetupError(
            f"--num-gpu-blocks-override {blocks} holds {room} tokens, but one sequence may have "
            f"{longest}: {shorter}raise it to at least {needed}"
        )
    raise SetupError(
        f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes} holds {room} tokens "
        f"({block_bytes} bytes a block of {layout.block_size}), but one sequence may have "
        f"{longest}: {shorter}raise it to at least {needed * block_bytes}"
    )


def resolve_threads(config: EngineConfig, ranks: int) -> int:
    """Compute threads of each rank: ``threads_per_rank``, or an equal share of the cores."""
    if config.threads_per_rank:
        return config.threads_per_rank
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // ranks)
