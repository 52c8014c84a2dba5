"""`make bench`: times of the whole stack on this machine, as a table for docs/benchmarks.md.

Starts `ekiden up`, sends prompts of random token ids (so nothing is found in a cache) with greedy
sampling and a fixed output length, and ends it. Times are read by the client:

    TTFT   request sent to first token          TPOT   (last token - first) / (tokens - 1)

What the gateway adds is the client's whole time less the decode replica's own account of it. The
transfer lasts from its first byte to its last, most of it while prefill still computes; `exposed`
is the part that the request waited for. The figures also go to build/bench/stack.json. Any other
option is one of `ekiden up`.
"""

from __future__ import annotations

import argparse
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.client import Client, Sample, client
from benchmarks.results import Row, publish, row
from benchmarks.stack import deployment, prompt_of


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="requests a row (default: 5)")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens (default: 32)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: 1)")
    args, up_options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends `up` too
    chance = random.Random(args.seed)
    with deployment(up_options) as url, client(url) as asked:
        asked.ask(prompt_of(chance, 64), 8)  # first-time costs
        machine = platform.processor() or platform.machine()
        print(f"{asked.model}, {machine}, `{' '.join(sys.argv)}`\n")
        rows: list[Row] = []
        print("| prompt | " + " | ".join(name for name, _ in COLUMNS) + " |")
        print("|---" * (len(COLUMNS) + 1) + "|")
        for length in (128, 2000):
            samples = [asked.ask(prompt_of(chance, length), args.tokens) for _ in range(args.runs)]
            cells = [(name, statistics.median(map(read, samples))) for name, read in COLUMNS]
            line = " | ".join(f"{value:.1f}" for _, value in cells)
            print(f"| {length} | {line} |", flush=True)  # a row shows when it is measured
            rows += [named(f"{name}, prompt {length}", value) for name, value in cells]
        print("\n| streams | output tokens/s |\n|---|---|")
        for streams in (1, 8):
            rate = throughput(asked, chance, streams, args)
            print(f"| {streams} | {rate:.1f} |", flush=True)
            rows.append(named(f"output tokens/s, {streams} streams", rate))
    publish("stack", rows)
    return 0


def named(name: str, ours: float) -> Row:
    """A figure without a peer or a goal; the unit is the last word before the comma."""
    return row(name, ours, name.partition(",")[0].split()[-1])


COLUMNS: tuple[tuple[str, Callable[[Sample], float]], ...] = (
    ("TTFT ms", lambda s: 1000 * s.ttft),
    ("TPOT ms", lambda s: 1000 * s.tpot),
    ("KV moved MB", lambda s: s.account["transfer"]["bytes"] / 1e6),
    ("transfer ms", lambda s: 1000 * s.account["transfer"]["seconds"]),
    ("exposed ms", lambda s: 1000 * s.account["times"]["transfer_s"]),
    ("gateway adds ms", lambda s: 1000 * s.added_by_gateway),
)


def throughput(
    asked: Client, chance: random.Random, streams: int, args: argparse.Namespace
) -> float:
    """Output tokens a second of ``streams`` clients, prompts of 128 tokens, prefill included."""
    prompts = [prompt_of(chance, 128) for _ in range(streams)]
    began = time.monotonic()
    answers = [asked.submit(prompt, 2 * args.tokens) for prompt in prompts]
    total = sum(answer.result().tokens for answer in answers)
    return total / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
