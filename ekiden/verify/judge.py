"""Is what a pair gave the truth? Tokens, logprobs and bytes, whichever way they were had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ekiden.cache.layout import KvLayout

from .compare import (
    Bits,
    Bound,
    Difference,
    KvDifference,
    Reference,
    Top,
    first_difference,
    first_kv_difference,
    logprob_distance,
)
from .outcome import CellFailed, Outcome
from .rule import converted

BOUNDS = {
    "float32": Bound(logprob=1e-4),
    "bfloat16": Bound(logprob=0.1, tie=0.2),
    "float16": Bound(logprob=0.1, tie=0.2),
    "int8": Bound(logprob=0.01, tie=0.02),
    "fp8_e4m3": Bound(logprob=0.01, tie=0.02),
}
"""By KV dtype. Replicas that add in another order may round a row of fewer bits otherwise."""


def bound_of(*dtypes: str) -> Bound:
    """The bound where KV passes through all of these dtypes: the widest."""
    return max((BOUNDS[dtype] for dtype in dtypes), key=lambda bound: bound.logprob)


def check_kv(
    name: str,
    source: tuple[KvLayout, Bits],
    target: tuple[KvLayout, Mapping[int, Bits]],
    tokens: int,
    outcome: Outcome,
) -> None:
    """Positions [0, tokens) of decode's ranks must be what prefill had, converted by the rule.

    ``source`` is the whole cache, ``[num_layers, num_kv_heads, tokens, 2, row]``.

    Raises:
        CellFailed: the first layer, head and position that differ.
    """
    (prefill, bits), (decode, ranks) = source, target
    wanted = converted(bits[:, :, :tokens], prefill.dtype, decode.dtype)
    difference = first_kv_difference(wanted, decode, ranks, tokens)
    if difference is not None:
        raise CellFailed("differs", _describe(name, difference))
    outcome.kv_tokens_compared += tokens


def check_output(
    name: str,
    reference: Reference,
    tokens: Sequence[int],
    tops: Sequence[Top],
    start: int,
    bound: Bound,
    outcome: Outcome,
) -> Difference | None:
    """Tokens and logprobs from output position ``start`` on against the truth.

    Returns the first position that differs and is a tie, else None.

    Raises:
        CellFailed: a token differs and is no tie, or a logprob is out of bounds.
    """
    difference = first_difference(reference, tokens, start, bound.tie)
    same = len(tokens) if difference is None else difference.position - start
    outcome.equal_tokens += same
    distance = logprob_distance(reference, tops[: same + 1], start)
    outcome.logprob = max(outcome.logprob, distance)
    about = f"prompt {name} ({len(reference.prompt)} tokens)"
    if difference is not None and not difference.tie:
        raise CellFailed(
            "differs",
            f"{about}, output position {difference.position}: {difference.got} instead of "
            f"{difference.expected}; the KV compared before is equal to the bit",
        )
    if distance > bound.logprob:
        raise CellFailed(
            "differs",
            f"{about}: a logprob is {distance:.2g} from the truth, more than {bound.logprob:g}; "
            "the KV compared before is equal to the bit",
        )
    outcome.ties += difference is not None
    return difference


def _describe(name: str, difference: KvDifference) -> str:
    return (
        f"prompt {name}: the KV differs first at layer {difference.layer}, head "
        f"{difference.head}, position {difference.position} ({difference.part}, decode rank "
        f"{difference.rank})"
    )
