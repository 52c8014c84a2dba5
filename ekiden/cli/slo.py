"""``--slo ttft=500,tpot=50``: what a request must keep to count for goodput."""

from __future__ import annotations

import argparse
from collections.abc import Callable

SLO_PARTS = ("ttft", "tpot", "e2e")
SLO_HELP = f"limits for goodput, of {', '.join(SLO_PARTS)}"


def slo_of(number: Callable[[str], float]) -> Callable[[str], dict[str, float]]:
    """A parser of limits in ms by part; ``number`` reads each."""

    def parse(text: str) -> dict[str, float]:
        limits = {}
        for one in text.split(","):
            name, _, value = one.partition("=")
            if name not in SLO_PARTS:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is no part of an SLO: choose of {', '.join(SLO_PARTS)}, "
                    "as ttft=500,tpot=50"
                )
            limits[name] = number(value)
        return limits

    return parse
