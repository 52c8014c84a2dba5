"""`make bench`: times of the whole stack on this machine, as a table for docs/benchmarks.md.

Starts `ekiden up`, sends prompts of random token ids (so nothing is found in a cache) with greedy
sampling and a fixed output length, and ends it. Times are read by the client:

    TTFT   request sent to first token          TPOT   (last token - first) / (tokens - 1)

What the gateway adds is the client's whole time less the decode replica's own account of it.
"""

from __future__ import annotations

import argparse
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from ekiden.cli.chat import server_events

VOCABULARY = range(1000, 40000)
"""Ordinary tokens in every model of the catalogue."""
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0


class Sample(NamedTuple):
    """One request. Seconds; ``usage`` is the gateway's."""

    ttft: float
    total: float
    tokens: int
    usage: dict[str, Any]

    @property
    def tpot(self) -> float:
        return (self.total - self.ttft) / max(1, self.tokens - 1)

    @property
    def added_by_gateway(self) -> float:
        return self.total - sum(self.usage["ekiden"]["times"].values())


def main() -> int:
    sys.stdout.reconfigure(line_buffering=True)  # a row shows when it is measured
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="requests a row (default: 5)")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens (default: 32)")
    parser.add_argument("--seed", type=int, default=1)
    args, up_options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends `up` too
    chance = random.Random(args.seed)
    with deployment(up_options) as url, httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S) as c:
        model = c.get("/v1/models").json()["data"][0]["id"]
        ask(c, model, chance, 64, 8)  # first-time costs
        print(f"{model}, {platform.processor() or platform.machine()}, `{' '.join(sys.argv)}`\n")
        print("| prompt | TTFT ms | TPOT ms | KV moved MB | transfer ms | gateway adds ms |")
        print("|---|---|---|---|---|---|")
        for length in (128, 2048):
            samples = [ask(c, model, chance, length, args.tokens) for _ in range(args.runs)]
            print(latency_row(length, samples))
        print("\n| streams | output tokens/s |\n|---|---|")
        for streams in (1, 8):
            print(f"| {streams} | {throughput(c, model, chance, streams, args):.1f} |")
    return 0


@contextmanager
def deployment(options: list[str]) -> Iterator[str]:
    """The URL of an `ekiden up` that lasts as long as the block."""
    argv = [sys.executable, "-m", "ekiden.cli", "up", "--port", "0", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as up:
        try:
            yield ready_url(up)
        finally:
            up.terminate()


def ready_url(up: subprocess.Popen[str]) -> str:
    """`ekiden up` has a deadline of its own for getting ready, and closes its output after it."""
    assert up.stdout is not None
    for line in up.stdout:
        if match := re.match(r"ready: .* on (http\S+)", line):
            return match[1]
    sys.exit("bench: `ekiden up` did not get ready")


def ask(
    client: httpx.Client, model: str, chance: random.Random, prompt_tokens: int, tokens: int
) -> Sample:
    body = {
        "model": model,
        "prompt": chance.choices(VOCABULARY, k=prompt_tokens),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    first, usage = 0.0, {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            sys.exit(f"bench: HTTP {response.status_code}: {response.read().decode()}")
        for event in server_events(response.iter_lines()):
            if event["choices"] and not first:
                first = time.monotonic() - began
            usage = event.get("usage") or usage
    return Sample(first, time.monotonic() - began, usage["completion_tokens"], usage)


def latency_row(length: int, samples: list[Sample]) -> str:
    moved = [sample.usage["ekiden"]["transfer"] for sample in samples]
    cells = (
        1000 * statistics.median(sample.ttft for sample in samples),
        1000 * statistics.median(sample.tpot for sample in samples),
        statistics.median(transfer["bytes"] for transfer in moved) / 1e6,
        1000 * statistics.median(transfer["seconds"] for transfer in moved),
        1000 * statistics.median(sample.added_by_gateway for sample in samples),
    )
    return f"| {length} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |"


def throughput(
    client: httpx.Client, model: str, chance: random.Random, streams: int, args: argparse.Namespace
) -> float:
    """Output tokens a second of ``streams`` clients, prompts of 128 tokens, prefill included."""
    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        futures = [
            pool.submit(ask, client, model, chance, 128, 2 * args.tokens) for _ in range(streams)
        ]
        total = sum(future.result().tokens for future in futures)
    return total / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
