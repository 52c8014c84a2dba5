"""Whether a replica fits, what breaks where it does not, and the nearest one that would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ekiden.core.errors import SetupError
from ekiden.planner.layout import Layout
from ekiden.planner.memory import Memory, RankSum, Replica, memory, show
from ekiden.planner.precision import KV_BYTES, kv_format, weight_format

MOST_GPUS = 64
"""How far the search for a layout goes."""
SMALLER = ("fp8", "awq")
"""Formats that are offered instead of wider ones: eight bits first, since they cost least."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, with the sum that it follows from."""

    replica: Replica
    memory: Memory
    sequences: int
    fits: bool
    breaks: str
    """The term that passes what is usable, in the order of the sum: one of ``memory.TERMS``, or
    ``kv``; empty where it fits."""
    reason: str
    """One sentence with the sum of the tightest rank."""
    nearest: Layout | None = None
    """The layout of fewest GPUs that fits with everything else as it is; None: none up to 64."""
    longest: int = 0
    """Tokens of a sequence that would fit in this very layout; 0: none."""
    smaller: str = ""
    """A format of weights that would fit in this very layout; empty: none that is offered."""
    cache: str = ""
    """A dtype of KV that would fit in this very layout; empty: none is smaller, or it would not."""

    @property
    def advice(self) -> str:
        """What would work instead; empty where it fits already."""
        found = [
            f"{self.nearest} ({self.nearest.gpus} GPUs)" if self.nearest else "",
            f"{self.smaller} weights" if self.smaller else "",
            f"a KV cache in {self.cache} (--kv-cache-dtype)" if self.cache else "",
            f"a max_model_len of at most {self.longest}" if self.longest else "",
        ]
        works = ", or ".join(text for text in found if text)
        if self.fits:
            return ""
        return f"nearest that works: {works}" if works else f"nothing up to {MOST_GPUS} GPUs works"


def fit(
    replica: Replica,
    *,
    sequences: int = 1,
    per_host: int = 8,
    smaller: Sequence[str] = SMALLER,
) -> Fit:
    """Whether ``sequences`` of max_model_len have room for their KV at once, on every rank.

    ``per_host``: GPUs within which TP may go when another layout is looked for; ``smaller``:
    formats of weights to try instead, the wider first.

    Raises:
        SetupError: what was asked for cannot be at all (a layout, a limit, a dtype).
    """
    check_length(replica)
    found = memory(replica)
    lacking = [rank for rank in found.ranks if _breaks(rank, found, sequences)]
    rank = min(lacking, key=lambda rank: rank.kv) if lacking else found.ranks[found.tightest]
    breaks = _breaks(rank, found, sequences)
    bare = Fit(
        replica=replica,
        memory=found,
        sequences=sequences,
        fits=not breaks,
        breaks=breaks,
        reason=_reason(rank, found, sequences, breaks),
    )
    if bare.fits:
        return bare
    return msgspec.structs.replace(
        bare,
        nearest=_nearest(replica, sequences, per_host),
        longest=_longest(replica, sequences),
        smaller=_smaller(replica, sequences, smaller),
        cache=_cache(replica, sequences),
    )


def check_length(replica: Replica) -> None:
    """No memory makes a model see further than it has positions: SetupError."""
    asked, reach = replica.resolved.max_model_len, replica.geometry.max_positions
    if asked > reach:
        raise SetupError(
            f"max_model_len {asked} is more than the {reach} positions of {replica.geometry.name}: "
            f"choose 1 to {reach}, or set RoPE scaling in its config.json"
        )


def fits(replica: Replica, sequences: int = 1) -> bool:
    """The bare answer, whatever positions the model has; raises as ``memory``."""
    found = memory(replica)
    return not any(_breaks(rank, found, sequences) for rank in found.ranks)


def _need(rank: RankSum, found: Memory, sequences: int) -> int:
    limits, block = found.limits, found.block_size
    length = -(-limits.max_model_len // (found.cp * block)) * block
    return -(-sequences // found.dp) * rank.shape.sequence_bytes(length, limits.chunk)


def _breaks(rank: RankSum, found: Memory, sequences: int) -> str:
    """The first term with which the running sum passes what is usable."""
    taken = 0
    for name, size in (*rank.terms(), ("kv", _need(rank, found, sequences))):
        taken += size
        if taken > rank.usable:
            return name
    return ""


def _reason(rank: RankSum, found: Memory, sequences: int, breaks: str) -> str:
    limits = found.limits
    terms = " + ".join(f"{show(size)} {name}" for name, size in rank.terms() if size)
    left = f"{show(rank.kv)} of {show(rank.usable)} usable are left for KV beside {terms}"
    wanted = (
        f"{sequences} x {limits.max_model_len} tokens take {show(_need(rank, found, sequences))}"
    )
    if not breaks:
        return f"fits: {left}; {wanted}"
    over = f"{wanted}" if breaks == "kv" else f"{breaks} passes what is usable"
    return f"does not fit: {over}; {left}"


def _layouts(replica: Replica, per_host: int) -> Iterator[Layout]:
    """By GPUs, fewest first; within a number the widest TP that stays in a host."""
    shares_experts = replica.layout.ep > 1
    gpus = 1
    while gpus <= MOST_GPUS:
        tp = min(gpus, per_host)
        while tp:
            if gpus % tp == 0:
                yield Layout(tp=tp, pp=gpus // tp, ep=tp if shares_experts else 1)
            tp //= 2
        gpus *= 2


def _nearest(replica: Replica, sequences: int, per_host: int) -> Layout | None:
    for layout in _layouts(replica, per_host):
        try:
            if fits(msgspec.structs.replace(replica, layout=layout), sequences):
                return layout
        except SetupError:
            continue  # This model or engine cannot be laid out so: the next one, then.
    return None


def _smaller(replica: Replica, sequences: int, names: Sequence[str]) -> str:
    for name in names:
        form = weight_format(name)
        smaller = msgspec.structs.replace(replica, weights=form)
        if form.bits < replica.weights.bits and fits(smaller, sequences):
            return name
    return ""


def _cache(replica: Replica, sequences: int) -> str:
    if KV_BYTES[kv_format(replica.kv_dtype)] == 1:
        return ""
    small = replica.profile.small_kv
    return small if fits(msgspec.structs.replace(replica, kv_dtype=small), sequences) else ""


def _longest(replica: Replica, sequences: int) -> int:
    """By halving: more tokens never need less."""
    least, most = 0, replica.resolved.max_model_len
    while most - least > 1:
        middle = (least + most) // 2
        limits = msgspec.structs.replace(replica.limits, max_model_len=middle)
        if fits(msgspec.structs.replace(replica, limits=limits), sequences):
            least = middle
        else:
            most = middle
    return least
