"""Free and whole memory of the CUDA cards, asked for in a process of its own.

To ask is to take: a process that asks CUDA holds some hundred megabytes of the card ever after. The
driver of the ranks must not, so a child asks, prints and ends: ``python -m
ekiden.engine.cuda_memory``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import msgspec

from ekiden.core.errors import SetupError

PROBE_TIMEOUT_S = 120.0
"""To import torch and open every card."""


class CardMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one card."""

    free: int
    total: int


@cache
def probe() -> tuple[CardMemory, ...]:
    """Every card that this process may use, in order, as it was before we took any of it.

    Raises:
        SetupError: there is none, or CUDA cannot be asked.
    """
    command = [sys.executable, "-P", "-m", "ekiden.engine.cuda_memory"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise SetupError(f"CUDA cannot be asked for its memory: {' '.join(said)}") from None
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"CUDA did not tell its memory within {PROBE_TIMEOUT_S:.0f} s: is a card wedged?"
        ) from None
    cards = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[CardMemory, ...])
    if not cards:
        raise SetupError("--device cuda finds no card: choose --device cpu")
    return cards


def main() -> None:
    import torch

    cards = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        cards.append({"free": free, "total": total})
    print(json.dumps(cards))


if __name__ == "__main__":
    main()
