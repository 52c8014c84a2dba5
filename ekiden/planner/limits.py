"""What an engine is told it may do at once: the figures that its peak memory follows from."""

from __future__ import annotations

from typing import Any

import msgspec

from ekiden.core.errors import SetupError


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replica. None: the engine profile's own default."""

    max_model_len: int | None = None
    """Tokens of prompt and output together."""
    max_num_seqs: int | None = None
    """Sequences in one step."""
    chunk: int | None = None
    """Tokens in one step (``--max-num-batched-tokens``)."""
    utilization: float | None = None
    """Share of the card (``--gpu-memory-utilization``)."""


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Every limit as a number."""

    max_model_len: int
    max_num_seqs: int
    chunk: int
    utilization: float


def resolve(limits: Limits, defaults: Resolved) -> Resolved:
    """``limits`` where they say something, else ``defaults``; checked.

    Raises:
        SetupError: a limit that no engine could take; names it, its value and what it may be.
    """
    given: dict[str, Any] = {
        k: v for k, v in msgspec.structs.asdict(limits).items() if v is not None
    }
    for name, value in given.items():
        if name == "utilization" and not 0 < value <= 1:
            raise SetupError(f"utilization {value:g} is not a share: above 0 and up to 1, as 0.9")
        if name != "utilization" and value < 1:
            raise SetupError(f"{name} {value} is too small: choose 1 or more")
    return msgspec.structs.replace(defaults, **given)
