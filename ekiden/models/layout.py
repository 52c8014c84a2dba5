"""How a model's KV is laid out over the ranks of one replica. No torch."""

from __future__ import annotations

from ekiden.cache.layout import SCALE_BYTES, KvLayout, RankLayout, is_scaled
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.models.config import ModelConfig
from ekiden.parallel.split import balanced_split, head_split

PROMPT_TOKENS = 512
"""Tokens for which a prefill pool is taken to run the head once; the figure matters little."""


def kv_layout(model: ModelConfig, config: EngineConfig) -> KvLayout:
    """The layout of the replica that ``config`` asks for, ranks in order pp_rank * tp + tp_rank.

    Raises:
        SetupError: more TP ranks than query heads, more stages than layers, or heads that a
            quantised cache cannot hold.
    """
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    return KvLayout(
        kind=_kind(model, config),
        dtype=kv_dtype(model, config),
        block_size=config.block_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        tp=tp,
        pp=pp,
        ranks=tuple(
            RankLayout(
                tp_rank=tp_rank,
                pp_rank=pp_rank,
                head_start=share.kv_start,
                head_stop=share.kv_stop,
                layer_start=first,
                layer_stop=last,
            )
            for pp_rank, (first, last) in enumerate(
                layer_split(model, pp, prefill_only=config.prefill_only)
            )
            for tp_rank, share in enumerate(head_split(model.num_heads, model.num_kv_heads, tp))
        ),
    )


def _kind(model: ModelConfig, config: EngineConfig) -> str:
    """Keys turned by other frequencies are a kind of KV that no peer may take for its own."""
    longest = model.resolve_max_model_len(config)
    return "attention, long RoPE" if model.rope.is_long(longest) else "attention"


def kv_dtype(model: ModelConfig, config: EngineConfig) -> str:
    """The dtype of KV, a key of ``KV_BYTES``: ``--kv-cache-dtype``, or that of activations.

    Raises:
        SetupError: floats of another kind than activations, or heads of a quantised cache that
            are no whole number of float32s long, so that scales would be out of place.
    """
    wanted, activations = config.kv_cache_dtype, model.resolve_dtype(config)
    if wanted == "auto":
        return activations
    dtype = "fp8_e4m3" if wanted == "fp8" else wanted
    if not is_scaled(dtype) and dtype != activations and config.kernels != "torch":
        raise SetupError(
            f"--kv-cache-dtype {wanted} beside activations of {activations} is more than the fast "
            f"kernels know: choose auto, {activations}, int8 or fp8"
        )
    if is_scaled(dtype) and model.head_dim % SCALE_BYTES:
        raise SetupError(
            f"--kv-cache-dtype {wanted} needs heads of a multiple of {SCALE_BYTES} numbers, and "
            f"the model's have {model.head_dim}: choose auto, float32, bfloat16 or float16"
        )
    return dtype


def layer_split(
    model: ModelConfig, pp: int, *, prefill_only: bool = False
) -> list[tuple[int, int]]:
    """Layers [start, stop) of each pipeline stage: no contiguous split has a cheaper slowest stage.

    Everyone who loads weights comes to the same split, since it follows from the model's shape,
    ``pp`` and ``EngineConfig.prefill_only`` alone. The peers of a hand-off read it in the layout.

    Raises:
        SetupError: more stages than layers.
    """
    if pp > model.num_layers:
        raise SetupError(
            f"--pipeline-parallel-size {pp} is more than the model's {model.num_layers} layers: "
            f"choose 1 to {model.num_layers}"
        )
    costs = layer_costs(model, tokens_per_logits=PROMPT_TOKENS if prefill_only else 1)
    return balanced_split(costs, pp)


def layer_costs(model: ModelConfig, *, tokens_per_logits: int = 1) -> list[int]:
    """Weights multiplied for one token of a step, by layer.

    The embedding, of which one row is read, goes with the first layer, and the head, which is
    multiplied once for every ``tokens_per_logits`` tokens, with the last one: those are always on
    the first and on the last stage. In decode every token has logits, and in a small model the
    head outweighs several layers (8 of SmolLM2-135M's 30). Attention over the context is left
    out: it is the same in every layer.
    """
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    costs = [model.hidden_size * (heads + 3 * model.intermediate_size)] * model.num_layers
    costs[0] += model.hidden_size
    costs[-1] += model.hidden_size * model.vocab_size // tokens_per_logits
    return costs


def imbalance(model: ModelConfig, config: EngineConfig) -> float:
    """How much longer the busiest TP rank works than the mean one, from its query heads.

    0.0 where heads divide evenly; 0.5 means that attention takes half again as long as it
    would on a TP size that divides.
    """
    shares = head_split(model.num_heads, model.num_kv_heads, config.tensor_parallel_size)
    mean = model.num_heads / len(shares)
    return max(share.num_q for share in shares) / mean - 1.0
