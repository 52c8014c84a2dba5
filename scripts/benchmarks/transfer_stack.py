"""What a hand-off costs over the whole stack: gateway, both services, their ranks."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.client import Client, Sample, client
from benchmarks.models import SMOLLM2, model_dir
from benchmarks.results import Row
from benchmarks.stack import deployment, prompt_of
from benchmarks.transfer_rows import at_most

BLOCK = 16
WORDS = range(3, 100)
"""Tokens of the tiny model."""
LONG, CHUNK = 4000, 512
HAND_OFF_MS, EXPOSED = 3.0, 5.0
"""At most: milliseconds for one block; percent of the time that prefill took."""

ONE_RANK = ("--prefill-tp", "1", "--local-prefill-tokens", "0")


def one_block(samples: int) -> list[Row]:
    """P50 of handing one block of a tiny model over, with what prefill took to compute it."""
    from ekiden.verify.tiny import write_tiny_model

    chance = random.Random(1)

    def ask(asked: Client) -> list[Sample]:
        prompts = [chance.choices(WORDS, k=BLOCK) for _ in range(samples + samples // 4 + 1)]
        return [asked.ask(prompt, 2) for prompt in prompts][-samples:]  # the first warm up

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        found = _ask([str(model), *ONE_RANK], ask)
    hand_off = 1000 * statistics.median(map(beside_prefill, found))
    step = 1000 * statistics.median(_times(sample)["prefill_s"] for sample in found)
    return [
        at_most(
            f"one block of a tiny model handed over, P50 (beside {step:.1f} ms of prefill)",
            hand_off,
            "ms",
            HAND_OFF_MS,
        )
    ]


def exposed(wire: str, samples: int) -> list[Row]:
    """The share of prefill's time that a long prompt waits for its KV after its first token."""
    chance = random.Random(1)

    def ask(asked: Client) -> list[Sample]:
        asked.ask(prompt_of(chance, CHUNK), 2)  # first-time costs
        return [asked.ask(prompt_of(chance, LONG), 2) for _ in range(samples)]

    path = str(model_dir(SMOLLM2))
    options = [path, *ONE_RANK, "--max-num-batched-tokens", str(CHUNK), "--kv-transport", wire]
    share = 100 * statistics.median(map(exposed_share, _ask(options, ask)))
    return [exposed_row(wire, share)]


def exposed_row(wire: str, share: float | None) -> Row:
    name = f"{LONG:,} tokens of SmolLM2-135M in chunks of {CHUNK}, {wire}: exposed of prefill"
    return at_most(name, share, "%", EXPOSED)


def beside_prefill(sample: Sample) -> float:
    """Seconds from a request's arrival on decode until its KV was there, without those between
    prefill's start and its first token: reservation, session, transfer, seal."""
    times = _times(sample)
    return times["queue_s"] + times["transfer_s"]


def exposed_share(sample: Sample) -> float:
    return _times(sample)["transfer_s"] / _times(sample)["prefill_s"]


def _times(sample: Sample) -> dict[str, float]:
    """Raises RuntimeError: the KV was not handed over at all."""
    if not sample.account["transfer"]["bytes"]:
        raise RuntimeError(f"nothing was handed over: {sample.account}")
    times: dict[str, float] = sample.account["times"]
    return times


def _ask(options: list[str], ask: Callable[[Client], list[Sample]]) -> list[Sample]:
    with deployment(options) as url, client(url) as asked:
        return ask(asked)
