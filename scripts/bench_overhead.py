"""`make bench-overhead`: tokens a second through the whole stack against the bare engine.

Eight clients, each of which asks anew when it is answered; prompts and answers of 64 to 192 tokens,
prefill included. The bare engine in one process; a deployment with a prefill and a decode replica
(gateway, hand-off and all); and one without a prefill pool. They get the same requests and take
turns on the same cores. `--burst` sends eight requests at once and waits for all, so that streams
start and end apart where prefill has to share the cores. Writes build/bench/overhead.json.
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

from benchmarks.client import client
from benchmarks.models import SMOLLM2, model_dir
from benchmarks.options import add_common, pin, result_name
from benchmarks.results import Row, figure, publish, row
from benchmarks.rounds import SETTLE_S
from benchmarks.stack import deployment, prompt_of
from benchmarks.worker import Worker

EXAMPLES = """examples:
  make bench-overhead
  make bench-overhead ARGS="--streams 32 --requests 128"
"""
BARE, HANDED, AGGREGATED = "bare engine", "prefill and decode pools", "decode pool alone"
POOLS = {HANDED: ("--prefill", "1", "--prefill-tp", "1"), AGGREGATED: ("--prefill", "0")}
GOAL = 0.9
"""Of the bare engine's rate, with the hand-off."""

LENGTHS = (64, 192)
"""Tokens of prompts and of answers, from and to."""

Requests = list[tuple[int, int]]
"""Tokens of prompt and of answer."""
Run = Callable[[Requests], float]
"""Output tokens a second of one turn."""


def main() -> int:
    args = parse()
    pin(args.threads)
    path = model_dir(args.model)
    with ExitStack() as held:
        turns: dict[str, Run] = {BARE: bare(path, args, held)}
        for name, pools in POOLS.items():
            turns[name] = stack(path, pools, args, held)
        rates = measure(turns, args)
    name = "overhead-burst" if args.burst else "overhead"
    publish(result_name(name, args), rows(args, rates))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--model", default=SMOLLM2, help=f"default: {SMOLLM2}")
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--requests", type=int, default=48, metavar="N",
                        help="of a turn, all streams together (default: 48)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="that count, after one of warm-up (default: 5)")  # fmt: skip
    parser.add_argument("--burst", action="store_true",
                        help="a request of 128 tokens, answered by 128, a stream")  # fmt: skip
    args = parser.parse_args()
    if args.quick:
        args.streams, args.requests, args.rounds = 2, 4, 1
    return args


def bare(path: Path, args: argparse.Namespace, held: ExitStack) -> Run:
    worker = Worker(BARE, "our_worker", [str(path), "--threads", str(args.threads)])
    held.callback(worker.close)

    def run(requests: Requests) -> float:
        answer = worker.call("streams", batch=args.streams, requests=requests)
        return float(answer["tokens"]) / float(answer["seconds"])

    return run


def stack(path: Path, pools: tuple[str, ...], args: argparse.Namespace, held: ExitStack) -> Run:
    url = held.enter_context(deployment([str(path), *pools]))
    asked = held.enter_context(client(url))
    pool = held.enter_context(ThreadPoolExecutor(args.streams))
    chance = random.Random(1)

    def run(requests: Requests) -> float:
        prompts = [prompt_of(chance, prompt) for prompt, _ in requests]
        answers = [answer for _, answer in requests]
        began = time.monotonic()
        tokens = sum(sample.tokens for sample in pool.map(asked.ask, prompts, answers))
        return tokens / (time.monotonic() - began)

    return run


def measure(turns: dict[str, Run], args: argparse.Namespace) -> dict[str, float]:
    """The median of each, after a round that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in turns}
    chance = random.Random(1)
    for number in range(args.rounds + 1):
        requests = [(128, 128)] * args.streams if args.burst else drawn(chance, args.requests)
        for name, run in turns.items():
            time.sleep(SETTLE_S)
            rates[name].append(run(requests))
        told = ", ".join(f"{name} {figure(found[-1])}" for name, found in rates.items())
        which = f"round {number} of {args.rounds}" if number else "warm-up"
        print(f"{which}: {told} tokens/s", file=sys.stderr, flush=True)
    return {name: statistics.median(found[1:]) for name, found in rates.items()}


def drawn(chance: random.Random, count: int) -> Requests:
    return [(chance.randint(*LENGTHS), chance.randint(*LENGTHS)) for _ in range(count)]


def rows(args: argparse.Namespace, rates: dict[str, float]) -> list[Row]:
    what = f"{args.model}, {'a burst of ' if args.burst else ''}{args.streams} streams"
    return [
        row(f"{what}, {name}", rates[name], "tokens/s", peer=rates[BARE], peer_name=BARE,
            goal=GOAL if name == HANDED and not args.burst else None)
        for name in POOLS
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
