"""What the transfers are compared with, the goals, the table and the chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import chart
from benchmarks.results import COLUMNS, Row, figure, row
from benchmarks.rounds import medians
from ekiden.plots.bars import bars

MEMCPY, SOCKETS, NIXL, UNTUNED = "memcpy", "TCP sockets", "NIXL READ", "UCX untuned"
SHM, UCX, TCP = "shm", "ucx", "tcp"
NO_NIXL = "NIXL READ (not installed: pip install nixl-cu12)"
GOALS_FROM = 1000
"""Tokens: below, a transfer is over in a few milliseconds, and what begins and ends it counts."""

COMPARED: tuple[tuple[str, str, float | None], ...] = (
    (SHM, MEMCPY, 0.9),
    (SHM, NIXL, 1.1),
    (UCX, SOCKETS, 1.0),
    (UCX, UNTUNED, 2.0),
    (TCP, SOCKETS, None),
)
"""Wire, peer, and the least ratio of the two."""
RESHARDED = 0.9
"""Of the same layout's rate, with the sender's heads on two ranks."""

Rates = Mapping[str, Sequence[float]]
"""Bytes a second in every round, by name."""


def resharded(wire: str) -> str:
    return f"{wire} TP2 to TP1"


def transfer_rows(measured: Mapping[int, Rates], *, nixl: bool) -> list[Row]:
    """GB/s by tokens. ``nixl``: it is installed."""
    found: list[Row] = []
    for tokens, rates in measured.items():
        gb = {name: rate / 1e9 for name, rate in medians(dict_of(rates)).items()}
        compared = [*COMPARED, *((resharded(wire), wire, RESHARDED) for wire in (SHM, UCX, TCP))]
        for ours, peer, goal in compared:
            shown = NO_NIXL if peer == NIXL and not nixl else peer
            found.append(
                row(f"{tokens:,} tokens, {ours}", gb.get(ours), "GB/s", peer=gb.get(peer),
                    peer_name=shown, goal=goal if tokens >= GOALS_FROM else None)
            )  # fmt: skip
    return found


def dict_of(rates: Rates) -> dict[str, list[float]]:
    return {name: list(found) for name, found in rates.items()}


def at_most(name: str, ours: float | None, unit: str, limit: float) -> Row:
    """A figure that is to stay within ``limit``: a ratio of 1.0 is the goal, and less is better."""
    ratio = None if ours is None else ours / limit
    met = None if ratio is None else ratio <= 1.0
    values = (name, ours, limit, "at most", unit, ratio, 1.0, met)
    return dict(zip(COLUMNS, values, strict=True))


def draw(path: Path, measured: Mapping[int, Rates]) -> None:
    """Bars of every contender, a group for each number of tokens."""
    by_tokens = {tokens: medians(dict_of(rates)) for tokens, rates in measured.items()}
    names = (MEMCPY, NIXL, SHM, SOCKETS, UNTUNED, UCX)
    series = {
        name: [rates.get(name, 0.0) / 1e9 for rates in by_tokens.values()]
        for name in names
        if any(name in rates for rates in by_tokens.values())
    }
    groups = [f"{tokens:,} tokens" for tokens in by_tokens]
    title = "KV moved between two processes"
    chart.write(path, bars(title, "GB/s", groups, series, show=figure))
