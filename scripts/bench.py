"""`make bench`: times of the whole stack on this machine, as a table for docs/benchmarks.md.

Starts `ekiden up`, sends prompts of random token ids (so nothing is found in a cache) with greedy
sampling and a fixed output length, and ends it. Times are read by the client:

    TTFT   request sent to first token          TPOT   (last token - first) / (tokens - 1)

What the gateway adds is the client's whole time less the decode replica's own account of it. The
transfer lasts from its first byte to its last, most of it while prefill still computes; `exposed`
is the part that the request waited for. The figures also go to build/bench/stack.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from ekiden.cli.chat import server_events

VOCABULARY = range(1000, 40000)
"""Ordinary tokens in every model of the catalogue."""
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0
RESULT = Path("build/bench/stack.json")
NO_PEER = ("peer", "peer_name", "ratio", "goal", "met")

Row = dict[str, Any]


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
        return self.total - sum(self.account["times"].values())

    @property
    def account(self) -> dict[str, Any]:
        account: dict[str, Any] = self.usage["ekiden"]
        return account


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
        rows: list[Row] = []
        print("| prompt | " + " | ".join(name for name, _ in COLUMNS) + " |")
        print("|---" * (len(COLUMNS) + 1) + "|")
        for length in (128, 2000):
            samples = [ask(c, model, chance, length, args.tokens) for _ in range(args.runs)]
            cells = [(name, statistics.median(map(read, samples))) for name, read in COLUMNS]
            print(f"| {length} | " + " | ".join(f"{value:.1f}" for _, value in cells) + " |")
            rows += [row(f"{name}, prompt {length}", value) for name, value in cells]
        print("\n| streams | output tokens/s |\n|---|---|")
        for streams in (1, 8):
            rate = throughput(c, model, chance, streams, args)
            print(f"| {streams} | {rate:.1f} |")
            rows.append(row(f"output tokens/s, {streams} streams", rate))
    write_rows(rows)
    return 0


def row(name: str, ours: float) -> Row:
    """A figure without a peer or a goal; the unit is the last word before the comma."""
    unit = name.partition(",")[0].split()[-1]
    return {"name": name, "ours": ours, "unit": unit, **dict.fromkeys(NO_PEER)}


def write_rows(rows: list[Row]) -> None:
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


COLUMNS: tuple[tuple[str, Callable[[Sample], float]], ...] = (
    ("TTFT ms", lambda s: 1000 * s.ttft),
    ("TPOT ms", lambda s: 1000 * s.tpot),
    ("KV moved MB", lambda s: s.account["transfer"]["bytes"] / 1e6),
    ("transfer ms", lambda s: 1000 * s.account["transfer"]["seconds"]),
    ("exposed ms", lambda s: 1000 * s.account["times"]["transfer_s"]),
    ("gateway adds ms", lambda s: 1000 * s.added_by_gateway),
)


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
