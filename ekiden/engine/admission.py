"""Whether a replica fits: its memory is foretold, shown, and held against what there is.

Nothing is loaded or allocated before; what does not fit is refused with the whole sum. On CPU all
ranks share what the host or the container has, and so do all replicas on it: those that are
starting are counted with what they have been promised (``ekiden.engine.ledger``), those that serve
hold their memory already. On CUDA every rank has a card.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from ekiden.cache.layout import KvLayout
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.engine.capacity import kv_memory, resolve_num_blocks
from ekiden.engine.cuda_memory import CardMemory, probe
from ekiden.engine.host_memory import available_bytes
from ekiden.engine.ledger import Ledger
from ekiden.engine.memory import SERVICE_OVERHEAD, RankMemory, forecast, show, table
from ekiden.models.config import ModelConfig
from ekiden.models.layout import imbalance, kv_layout

logger = logging.getLogger(__name__)

_REMEDY = "lower --kv-cache-memory, --max-num-batched-tokens or --max-num-seqs"


def admit(
    model: ModelConfig,
    config: EngineConfig,
    name: str,
    *,
    staging: int = 0,
    available: Callable[[], int | None] = available_bytes,
    ledger: Ledger | None = None,
    cards: Callable[[], Sequence[CardMemory]] = probe,
) -> AbstractContextManager[object]:
    """Log the forecast of replica ``name`` and check it; the promise holds until closed.

    Close it when the ranks are ready. ``staging`` is the memory of each rank's KV port.

    Raises:
        SetupError: it does not fit; the message has the sum and what to lower.
    """
    layout = kv_layout(model, config)
    blocks = resolve_num_blocks(model, config, layout, cards=cards)
    ranks = forecast(model, config, layout, blocks, staging=staging)
    for line in table(ranks):
        logger.info("%s", line)
    if (cost := imbalance(model, config)) > 0:
        logger.warning(
            "%d heads do not divide by -tp %d: attention takes %.0f%% longer than if they did",
            model.num_heads,
            config.tensor_parallel_size,
            100 * cost,
        )
    if config.device != "cpu":
        _check_cards(ranks, cards())
        return nullcontext()
    room = available()
    if room is None:
        logger.warning("this system does not tell how much memory it has: nothing was checked")
        return nullcontext()
    need = sum(rank.total for rank in ranks) + SERVICE_OVERHEAD

    def check(promised: int) -> None:
        logger.info("memory: %s, of %s available here", _sum(ranks), show(room - promised))
        if need > room - promised:
            raise SetupError(_refusal(config, layout, ranks, need, room, promised))

    return (ledger or Ledger.of_this_user()).book(need, name, check)


def _sum(ranks: Sequence[RankMemory]) -> str:
    ranks_total = sum(rank.total for rank in ranks)
    return (
        f"{show(ranks_total)} in {len(ranks)} rank{'s' * (len(ranks) > 1)} + "
        f"{show(SERVICE_OVERHEAD)} service = {show(ranks_total + SERVICE_OVERHEAD)}"
    )


def _refusal(
    config: EngineConfig,
    layout: KvLayout,
    ranks: Sequence[RankMemory],
    need: int,
    room: int,
    promised: int,
) -> str:
    smaller = "--dtype bfloat16" if config.dtype == "float32" else "-q int8 or -q int4"
    taken = f", {show(promised)} of it promised to replicas that are starting" if promised else ""
    return (
        f"this replica does not fit: {'; '.join(table(ranks))}; {_sum(ranks)}, and this host (or "
        f"its container) has {show(room)} available{taken}: {_REMEDY} (KV is "
        f"{show(kv_memory(config))} now), or choose a smaller model or {smaller}; "
        f"{show(need - room + promised)} are lacking"
    )


def _check_cards(ranks: Sequence[RankMemory], cards: Sequence[CardMemory]) -> None:
    """Raises SetupError for the first rank whose card has too little free."""
    for rank, (memory, card) in enumerate(zip(ranks, cards, strict=False)):
        if memory.total > card.free:
            raise SetupError(
                f"rank {rank} does not fit its card: {memory}, and {show(card.free)} of "
                f"{show(card.total)} are free: {_REMEDY} or --gpu-memory-utilization, or raise "
                "--tensor-parallel-size"
            )
