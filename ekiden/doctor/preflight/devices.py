"""Devices and their driver, asked for in a process of its own: to ask CUDA is to take memory.

``python -m ekiden.doctor.preflight.devices`` prints what torch sees.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from ekiden.doctor.preflight.check import Check, failure, ok, warning

ASK_S = 120.0
"""To import torch and open every card."""
FREE = 0.9
"""Of a card that nobody else uses."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One CUDA device; memory in bytes."""

    name: str
    free: int
    total: int


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What torch sees."""

    torch: str
    cuda: str | None
    """The CUDA that torch was built for; None: a build for CPUs."""
    cards: tuple[Card, ...] = ()


def ask() -> Devices | str:
    """What a child saw, or why it saw nothing."""
    command = [sys.executable, "-P", "-m", "ekiden.doctor.preflight.devices"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ASK_S, check=True)
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Devices)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return " ".join(said) or f"it ended with code {error.returncode}"
    except subprocess.TimeoutExpired:
        return f"no answer within {ASK_S:.0f} s: is a card wedged?"


def devices(device: str, ranks: int, found: Devices | str) -> list[Check]:
    """``found``: what ``ask`` gave."""
    name = "devices"
    if isinstance(found, str):
        return [
            failure(name, f"torch cannot be used: {found}", "pip install 'ekiden[worker]'")
        ]  # fmt: skip
    build = f"torch {found.torch}, {f'CUDA {found.cuda}' if found.cuda else 'a build for CPUs'}"
    if device == "cpu":
        return [ok(name, f"{build}; --device cpu needs no card")]
    if not found.cards:
        remedy = (
            "a driver that is as new as this CUDA, and cards that the container may see"
            if found.cuda
            else "a CUDA build of torch (EKIDEN_TORCH=auto of the installer), or --device cpu"
        )
        return [failure(name, f"{build}, and it sees no card", remedy)]
    return [_enough(name, ranks, found, build), *_used(found.cards)]


def _enough(name: str, ranks: int, found: Devices, build: str) -> Check:
    cards = ", ".join(f"{card.name} {card.total / (1 << 30):.0f} GiB" for card in found.cards)
    if len(found.cards) < ranks:
        return failure(
            name, f"{ranks} ranks want a card each, and there are {len(found.cards)}: {cards}",
            f"-tp and -pp whose product is at most {len(found.cards)}",
        )  # fmt: skip
    return ok(name, f"{build}; {cards}")


def _used(cards: Sequence[Card]) -> list[Check]:
    used = [
        f"card {index} has {card.free / (1 << 30):.1f} of {card.total / (1 << 30):.1f} GiB free"
        for index, card in enumerate(cards)
        if card.free < FREE * card.total
    ]
    remedy = "end what else uses it, or lower --gpu-memory-utilization"
    return [warning("card memory", ", ".join(used), remedy)] if used else []


def main(say: Callable[[str], None] = print) -> None:
    import torch

    cards = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        cards.append({"name": torch.cuda.get_device_name(index), "free": free, "total": total})
    say(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "cards": cards}))


if __name__ == "__main__":
    main()
