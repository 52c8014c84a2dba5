"""How many KV blocks and threads a replica gets: decided once, in the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ekiden.cache.layout import KvLayout
from ekiden.core.config import EngineConfig
from ekiden.core.cores import usable_cores
from ekiden.core.errors import SetupError
from ekiden.engine.cuda_memory import CardMemory, probe
from ekiden.engine.memory import forecast
from ekiden.models.config import ModelConfig

DEFAULT_KV_MEMORY = 1 << 30
"""Bytes of KV of a replica on CPU that was not told how many."""


def kv_memory(config: EngineConfig) -> int:
    """Bytes of KV of the whole replica, where no card's size decides."""
    return config.kv_cache_memory_bytes or DEFAULT_KV_MEMORY


def resolve_num_blocks(
    model: ModelConfig,
    config: EngineConfig,
    layout: KvLayout,
    *,
    cards: Callable[[], Sequence[CardMemory]] = probe,
) -> int:
    """KV blocks of every rank: the override, or what the memory for KV buys.

    That is ``kv_cache_memory_bytes``. Where it is not given, a CPU replica has DEFAULT_KV_MEMORY,
    and a CUDA one what ``gpu_memory_utilization`` of the smallest card leaves.

    Raises:
        SetupError: they do not hold one sequence of max_model_len; the message gives the
            numbers and the options to change.
    """
    block_bytes = layout.token_bytes() * layout.block_size
    on_cards = config.device != "cpu" and not config.kv_cache_memory_bytes
    if config.num_gpu_blocks_override:
        blocks = config.num_gpu_blocks_override
    elif on_cards:
        blocks = _blocks_of_cards(model, config, layout, cards())
    else:
        blocks = kv_memory(config) // block_bytes
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
    if on_cards:
        raise SetupError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization:g} leaves KV for {room} "
            f"tokens, but one sequence may have {longest}: {shorter}raise it, or "
            "--tensor-parallel-size"
        )
    raise SetupError(
        f"--kv-cache-memory {kv_memory(config)} holds {room} tokens "
        f"({block_bytes} bytes a block of {layout.block_size}), but one sequence may have "
        f"{longest}: {shorter}raise it to at least {needed * block_bytes}"
    )


def _blocks_of_cards(
    model: ModelConfig, config: EngineConfig, layout: KvLayout, cards: Sequence[CardMemory]
) -> int:
    """Blocks that every rank's card holds beside weights, activations and overhead; 0 for none."""
    ranks = forecast(model, config, layout, 0)
    if len(cards) < len(ranks):
        raise SetupError(
            f"--device cuda needs a card for each of {len(ranks)} ranks, and there are "
            f"{len(cards)}: lower --tensor-parallel-size or --pipeline-parallel-size"
        )
    rooms = [
        min(int(card.total * config.gpu_memory_utilization), card.free) - rank.total
        for rank, card in zip(ranks, cards, strict=False)
    ]
    return max(0, min(room // layout.block_bytes(i) for i, room in enumerate(rooms)))


def resolve_threads(config: EngineConfig, ranks: int) -> int:
    """Compute threads of each rank: ``threads_per_rank``, or an equal share of the cores."""
    if config.threads_per_rank:
        return config.threads_per_rank
    return max(1, usable_cores() // ranks)
