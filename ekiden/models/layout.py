"""How a model's KV is laid out over the ranks of one replica. No torch."""

from __future__ import annotations

from ekiden.cache.layout import KvLayout, RankLayout
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.models.config import ModelConfig
from ekiden.parallel.split import even_split, head_split


def kv_layout(model: ModelConfig, config: EngineConfig) -> KvLayout:
    """The layout of the replica that ``config`` asks for, ranks in order pp_rank * tp + tp_rank.

    Raises:
        SetupError: more TP ranks than query heads, or more stages than layers.
    """
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    return KvLayout(
        dtype=model.resolve_dtype(config),
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
            for pp_rank, (first, last) in enumerate(layer_split(model.num_layers, pp))
            for tp_rank, share in enumerate(head_split(model.num_heads, model.num_kv_heads, tp))
        ),
    )


def layer_split(num_layers: int, pp: int) -> list[tuple[int, int]]:
    """Layers [start, stop) of each pipeline stage; the first stages take one more.

    Raises:
        SetupError: more stages than layers.
    """
    if pp > num_layers:
        raise SetupError(
            f"--pipeline-parallel-size {pp} is more than the model's {num_layers} layers: "
            f"choose 1 to {num_layers}"
        )
    return even_split(num_layers, pp)


def imbalance(model: ModelConfig, config: EngineConfig) -> float:
    """How much longer the busiest TP rank works than the mean one, from its query heads.

    0.0 where heads divide evenly; 0.5 means that attention takes half again as long as it
    would on a TP size that divides.
    """
    shares = head_split(model.num_heads, model.num_kv_heads, config.tensor_parallel_size)
    mean = model.num_heads / len(shares)
    return max(share.num_q for share in shares) / mean - 1.0
