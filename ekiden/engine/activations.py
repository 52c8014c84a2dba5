"""What steps take of memory on a rank, from shapes alone."""

from __future__ import annotations

from ekiden.cache.layout import DTYPE_BYTES, KvLayout
from ekiden.core.config import EngineConfig
from ekiden.engine.step_bytes import GATHERED_TOKENS, layer_bytes, logit_bytes, shared_bytes
from ekiden.models.config import ModelConfig
from ekiden.parallel.split import even_part, head_split

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
    """Of one layer of the largest step."""
    tp, tp_rank = layout.tp, layout.ranks[rank].tp_rank
    heads = head_split(model.num_heads, model.num_kv_heads, tp)[tp_rank]
    return layer_bytes(
        tokens=config.max_num_batched_tokens,
        hidden=model.hidden_size,
        queries=heads.num_q * model.head_dim,
        qkv=(heads.num_q + 2 * heads.num_kv) * model.head_dim,
        inner=even_part(model.intermediate_size, tp, tp_rank),
        gathered=_gathered(model, config, layout, rank),
        width=DTYPE_BYTES[model.resolve_dtype(config)],
    )


def _gathered(model: ModelConfig, config: EngineConfig, layout: KvLayout, rank: int) -> int:
    """One layer's keys and values of the longest sequence, as attention in plain torch wants."""
    longest = min(model.resolve_max_model_len(config), GATHERED_TOKENS)
    return longest * layout.block_bytes(rank) // layout.block_size // layout.ranks[rank].num_layers


def _logit_bytes(model: ModelConfig, config: EngineConfig, layout: KvLayout, rank: int) -> int:
    """Of the last stage, which samples."""
    place = layout.ranks[rank]
    if place.pp_rank < layout.pp - 1:
        return 0
    rows = config.max_num_seqs * (1 + config.speculative_config.num_speculative_tokens)
    rows = min(rows, config.max_num_batched_tokens)
    return logit_bytes(rows=rows, vocab=model.vocab_size, tp=layout.tp, tp_rank=place.tp_rank)


def _shared_bytes(model: ModelConfig, config: EngineConfig, layout: KvLayout) -> int:
    step = config.max_num_batched_tokens * model.hidden_size
    step *= DTYPE_BYTES[model.resolve_dtype(config)]
    return shared_bytes(step=step, tp=layout.tp, pp=layout.pp)
