"""What steps take of memory on a rank, from shapes alone."""

from __future__ import annotations

from ekiden.cache.layout import DTYPE_BYTES, KvLayout
from ekiden.core.config import EngineConfig
from ekiden.models.config import ModelConfig
from ekiden.parallel.split import even_split, head_split

COLLECTIVE_SLOT = 4 << 20
"""Most bytes of one rank's slot in the shared memory of a TP group; there are two a rank."""

SPARE_STEPS = 3
"""Pieces of memory that are kept beside those of the largest step, in such steps: measured after
prompts of a hundred lengths (TinyLlama's step takes 32 MiB, 129 are kept; SmolLM2's 10, and 36)."""


def activation_bytes(model: ModelConfig, config: EngineConfig, layout: KvLayout, rank: int) -> int:
    """Bytes alive at once in the largest step, at most: a layer's, the logits', shared memory's."""
    layer = _layer_bytes(model, config, layout, rank)
    logits = _logit_bytes(model, config, layout, rank)
    return max(layer, logits) + _shared_bytes(model, config, layout)


def spare_bytes(model: ModelConfig, config: EngineConfig, layout: KvLayout, rank: int) -> int:
    """Bytes that native kernels keep between steps, once prompts of many lengths have come.

    Memory is shared by tensors of about one size only, so steps of other lengths have their own,
    up to what an arena may keep.
    """
    # Late, since these bring torch.
    from ekiden.cache.tensors import TORCH_DTYPES
    from ekiden.layers.backends.native.arena import SPARE_BYTES
    from ekiden.models.held import packs

    if not packs(config, TORCH_DTYPES[model.resolve_dtype(config)]):
        return 0
    return min(SPARE_BYTES, SPARE_STEPS * _layer_bytes(model, config, layout, rank))


def _layer_bytes(model: ModelConfig, config: EngineConfig, layout: KvLayout, rank: int) -> int:
    """Of one layer of the largest step.

    T tokens, C hidden, Q and E widths of the queries and of q, k, v together, I inner.
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
    return stream + max(attention, mlp)


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
