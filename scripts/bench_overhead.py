"""`make bench-overhead`: tokens a second through the whole stack against the bare engine.

Eight streams, prompts of 128 tokens, answers of 128, prefill included: the bare engine in one
process; a deployment with a prefill and a decode replica (gateway, hand-off and all); and one
without a prefill pool. They take turns on the same cores. Writes build/bench/overhead.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.models import SMOLLM2, model_dir
from benchmarks.options import add_common, pin, result_name
from benchmarks.results import Row, figure, publish, row
from benchmarks.rounds import SETTLE_S
from benchmarks.stack import ask, client, deployment, prompt_of
from benchmarks.worker import Worker

EXAMPLES = """examples:
  make bench-overhead
  make bench-overhead ARGS="--threads-per-rank 1"
"""
BARE, HANDED, AGGREGATED = "bare engine", "prefill and decode pools", "decode pool alone"
POOLS = {HANDED: ("--prefill", "1", "--prefill-tp", "1"), AGGREGATED: ("--prefill", "0")}
GOAL = 0.9
"""Of the bare engine's rate, with the hand-off."""

Run = Callable[[], float]
"""Output tokens a second of one turn."""


def main() -> int:
    args = parse()
    pin(args.threads)
    path = model_dir(args.model)
    with ExitStack() as held:
        turns: dict[str, Run] = {BARE: bare(path, args, held)}
        for name, pools in POOLS.items():
            turns[name] = stack(path, pools, args, held)
        rates = measure(turns, args.rounds)
    publish(result_name("overhead", args), rows(args.model, args.streams, rates))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--model", default=SMOLLM2, help=f"default: {SMOLLM2}")
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="that count, after one of warm-up (default: 5)")  # fmt: skip
    parser.add_argument("--threads-per-rank", type=int, metavar="N",
                        help="in the deployments (default: as --threads; the pools mostly work "
                        "in turns)")  # fmt: skip
    args = parser.parse_args()
    if args.quick:
        args.streams, args.prompt, args.tokens, args.rounds = 2, 80, 8, 1
    args.threads_per_rank = args.threads_per_rank or args.threads
    return args


def bare(path: Path, args: argparse.Namespace, held: ExitStack) -> Run:
    worker = Worker(BARE, "our_worker", [str(path), "--threads", str(args.threads)])
    held.callback(worker.close)

    def run() -> float:
        answer = worker.call(
            "generate", batch=args.streams, context=args.prompt, max_tokens=args.tokens
        )
        return float(answer["tokens"]) / float(answer["seconds"])

    return run


def stack(path: Path, pools: tuple[str, ...], args: argparse.Namespace, held: ExitStack) -> Run:
    threads = str(args.threads_per_rank)
    url = held.enter_context(deployment([str(path), *pools, "--threads-per-rank", threads]))
    http, model = held.enter_context(client(url))
    pool = held.enter_context(ThreadPoolExecutor(args.streams))
    chance = random.Random(1)

    def run() -> float:
        prompts = [prompt_of(chance, args.prompt) for _ in range(args.streams)]
        began = time.monotonic()
        samples = pool.map(lambda prompt: ask(http, model, prompt, args.tokens), prompts)
        tokens = sum(sample.tokens for sample in samples)
        return tokens / (time.monotonic() - began)

    return run


def measure(turns: dict[str, Run], rounds: int) -> dict[str, float]:
    """The median of each, after a round that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, run in turns.items():
            time.sleep(SETTLE_S)
            rates[name].append(run())
        told = ", ".join(f"{name} {figure(found[-1])}" for name, found in rates.items())
        which = f"round {number} of {rounds}" if number else "warm-up"
        print(f"{which}: {told} tokens/s", file=sys.stderr, flush=True)
    return {name: statistics.median(found[1:]) for name, found in rates.items()}


def rows(model: str, streams: int, rates: dict[str, float]) -> list[Row]:
    return [
        row(f"{model}, {streams} streams, {name}", rates[name], "tokens/s", peer=rates[BARE],
            peer_name=BARE, goal=GOAL if name == HANDED else None)
        for name in POOLS
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
