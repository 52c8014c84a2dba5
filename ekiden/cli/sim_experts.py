"""Options of ``ekiden sim`` for mixtures of experts: how they are dealt out, how they are hit."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ekiden.cli.options import at_least

if TYPE_CHECKING:
    from ekiden.planner.layout import Layout
    from ekiden.planner.options import Asked


def add_experts(group: Any) -> None:
    """With vLLM's spellings where it has them."""
    group.add_argument(
        "-dp", "--data-parallel-size", type=at_least(1), default=1, metavar="N",
        help="groups of a replica, each of --tensor-parallel-size GPUs with attention and KV of "
        "its own (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--enable-expert-parallel", action="store_true",
        help="deal whole experts over the GPUs of a replica, in place of a part of each",
    )  # fmt: skip
    group.add_argument(
        "--expert-skew", type=_exponent, metavar="S",
        help="Zipf exponent of how popular experts are, others by kind of prompt; 0: all alike "
        "(default: ranks share tokens as the latency model says)",
    )  # fmt: skip


def layout(args: argparse.Namespace, asked: Asked) -> Layout:
    """Of a replica: EP over all its TP x DP ranks, or none, as in vLLM.

    Raises:
        SetupError: experts are to be dealt out, and there are none or there is one rank.
    """
    import msgspec

    from ekiden.core.errors import SetupError
    from ekiden.planner.layout import Layout

    found = msgspec.structs.replace(asked.pinned or Layout(), dp=args.data_parallel_size)
    if not args.enable_expert_parallel:
        return found
    if not asked.geometry.experts:
        raise SetupError(
            f"--enable-expert-parallel: {asked.geometry.name} is dense and has no experts: leave "
            "it out"
        )
    if found.tp * found.dp == 1:
        raise SetupError(
            "--enable-expert-parallel deals experts over the GPUs of a replica, and it has one: "
            "add -tp or -dp of 2 or more"
        )
    return msgspec.structs.replace(found, ep=found.tp * found.dp)


def _exponent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no exponent: 0 or more, as 1") from None
