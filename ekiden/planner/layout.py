"""How a replica is laid out over GPUs, and what of a matrix or a layer comes to a rank."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from ekiden.core.errors import SetupError
from ekiden.parallel.split import balanced_split, even_part, even_split, head_split
from ekiden.planner.geometry import Geometry
from ekiden.planner.matrices import HEADS, KV_HEADS, WHOLE, Matrix
from ekiden.planner.parts import AnyAttention, Attention, LinearAttention


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: TP x PP ranks; with attention-DP, dp groups of TP that share experts by EP;
    with context parallelism, cp groups of TP that each have all weights and a part of each prompt.

    Experts are dealt whole over ``ep`` ranks. With ep < tp the tp/ep ranks that have the same
    experts cut each of them; with ep > tp the experts are dealt over several DP groups.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def stage_gpus(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.dp * self.cp

    @property
    def gpus(self) -> int:
        return self.stage_gpus * self.pp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.tp if self.ep == 1 else max(1, self.tp // self.ep)

    def __str__(self) -> str:
        sizes = zip(("TP", "PP", "DP", "EP", "CP"), msgspec.structs.astuple(self), strict=True)
        return " x ".join(f"{name}{size}" for name, size in sizes if size > 1) or "TP1"


def check_layout(geometry: Geometry, layout: Layout, *, tp_divides: bool = False) -> None:
    """Refuse what cannot be laid out; ``tp_divides``: the engine wants heads to divide evenly.

    Raises:
        SetupError: names the size, its value and the nearest that work.
    """
    for name in ("tp", "pp", "dp", "ep", "cp"):
        if (size := getattr(layout, name)) < 1:
            raise SetupError(f"{name} {size} is not a number of GPUs: choose 1 or more")
    heads = geometry.heads
    if layout.tp > heads:
        raise SetupError(
            f"TP {layout.tp} is more than the {heads} query heads of {geometry.name}: choose 1 to "
            f"{heads}"
        )
    if tp_divides and heads % layout.tp:
        below = max(n for n in range(1, layout.tp) if heads % n == 0)
        above = min(n for n in range(layout.tp, heads + 1) if heads % n == 0)
        raise SetupError(
            f"TP {layout.tp} does not divide the {heads} query heads of {geometry.name}, which "
            f"this engine needs: choose {below} or {above}"
        )
    if layout.pp > len(geometry.layers):
        raise SetupError(
            f"PP {layout.pp} is more than the {len(geometry.layers)} layers of {geometry.name}: "
            f"choose 1 to {len(geometry.layers)}"
        )
    _check_experts(geometry, layout)
    _check_context(geometry, layout)


def _check_context(geometry: Geometry, layout: Layout) -> None:
    if layout.cp == 1:
        return
    if layout.dp > 1:
        raise SetupError(
            f"CP {layout.cp} does not go with DP {layout.dp}: CP cuts one prompt over groups of "
            "ranks, and with attention-DP each group has prompts of its own: choose 1 of either"
        )
    if not cuts_prompts(geometry):
        raise SetupError(
            f"CP {layout.cp} cuts a prompt, and layers of {geometry.name} with linear attention "
            "hand a state from each token to the next: choose 1"
        )


def cuts_prompts(geometry: Geometry) -> bool:
    """Whether the parts of a prompt can be computed side by side, as CP does."""
    return not any(isinstance(layer.attention, LinearAttention) for layer in geometry.kinds)


def _check_experts(geometry: Geometry, layout: Layout) -> None:
    ep, tp = layout.ep, layout.tp
    if ep > 1 and not geometry.experts:
        raise SetupError(f"EP {ep} needs experts, and {geometry.name} is dense: choose 1")
    if ep > max(geometry.experts, 1):
        raise SetupError(
            f"EP {ep} is more than the {geometry.experts} experts of {geometry.name}: choose 1 to "
            f"{geometry.experts}"
        )
    ranks = tp * layout.dp
    fitting = [n for n in range(1, ranks + 1) if tp % n == 0 or (ranks % n == 0 and n % tp == 0)]
    if ep not in fitting:
        raise SetupError(
            f"EP {ep} does not go with TP {tp} x DP {layout.dp}: choose one of "
            f"{', '.join(map(str, fitting))}"
        )


def stages(geometry: Geometry, pp: int, *, balanced: bool) -> list[tuple[int, int]]:
    """Layers [start, stop) of each stage.

    ``balanced``: no stage is slower than it must be, the head counted to the last one, as this
    engine splits; else evenly by number.
    """
    if not balanced:
        return even_split(len(geometry.layers), pp)
    if pp == 1:
        return [(0, len(geometry.layers))]
    return _balanced(geometry, pp)


@lru_cache(maxsize=64)
def _balanced(geometry: Geometry, pp: int) -> list[tuple[int, int]]:
    hidden = geometry.hidden
    cost = {
        layer: sum(m.elements for m in layer.matrices(hidden) if m.part not in ("norm", "bias"))
        for layer in geometry.kinds
    }
    costs = [cost[layer] for layer in geometry.layers]
    costs[0] += hidden
    costs[-1] += hidden * geometry.vocab
    return balanced_split(costs, pp)


def local(matrix: Matrix, attention: AnyAttention, layout: Layout, rank: int) -> Matrix:
    """What of ``matrix`` lies on a rank; ``rank`` counts within the ranks of a stage.

    The attention of the layer says how heads are dealt. Ranks that replicate a KV head each have
    all of it.
    """
    tp, tp_rank = layout.tp, rank % layout.tp
    copies = matrix.copies
    if copies > 1:
        tp, tp_rank = layout.expert_tp, rank % layout.expert_tp
        copies = even_part(copies, layout.ep, rank // layout.expert_tp % layout.ep)
    if matrix.cut == WHOLE:
        return msgspec.structs.replace(matrix, copies=copies)
    length = (matrix.rows, matrix.cols)[matrix.axis]
    length = _part(matrix, attention, length, tp, tp_rank)
    sizes = {"rows": length} if matrix.axis == 0 else {"cols": length}
    return msgspec.structs.replace(matrix, copies=copies, **sizes)


def same_part(experts: int, layout: Layout, rank: int) -> tuple[int, int, int]:
    """A key that ranks of a stage share which hold parts of the same sizes."""
    cut = layout.expert_tp
    return rank % layout.tp, rank % cut, even_part(experts, layout.ep, rank // cut % layout.ep)


def _part(matrix: Matrix, attention: AnyAttention, length: int, tp: int, tp_rank: int) -> int:
    if matrix.cut not in (HEADS, KV_HEADS):
        return even_part(length, tp, tp_rank)
    kv_heads = attention.kv_heads if isinstance(attention, Attention) else attention.heads
    share = head_split(attention.heads, kv_heads, tp)[tp_rank]
    if matrix.cut == HEADS:
        return length // attention.heads * share.num_q
    return length // kv_heads * share.num_kv
