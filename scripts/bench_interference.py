"""`make bench-interference`: what long prompts do to the streams that are already running.

Eight clients stream answers without a pause while prompts of 4,000 tokens arrive at a fixed
interval, through three real deployments on the same cores with the same number of threads:

    disaggregated         a prefill replica and a decode replica, which share the threads
    aggregated, chunked   one replica; a step holds 512 tokens, decode rows and a part of a prompt
    aggregated, whole     one replica; a step holds a whole prompt

They take turns, idle while another has its round, and see the same prompts. TPOT is a request's
(last token - first) / (tokens - 1); ITL is every gap between two tokens. Only requests that ended
while long prompts were about are counted, those of all rounds together. Writes
build/bench/interference.json and interference.svg.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import NamedTuple

from benchmarks import chart
from benchmarks.client import Client, Sample, client
from benchmarks.models import SMOLLM2, model_dir
from benchmarks.options import add_charts, add_common, pin, result_name
from benchmarks.results import Row, figure, publish, row
from benchmarks.stack import deployment, percentile, prompt_of

from ekiden.plots.bars import bars

EXAMPLES = """examples:
  make bench-interference
  make bench-interference ARGS="--interval 20 --charts docs/charts"
"""
STREAM_PROMPT = 32
"""Tokens; few enough for the decode replica to compute them itself."""
LONG_ANSWER = 8
"""Tokens that a long prompt asks for."""
SPARE_LENGTH = 256
CHUNK = 512
ROUND_SEEDS, WARM_UP = 1000, 999
"""Seeds of one round, and which of them is the warm-up's; 0 is the long prompts', 1.. streams'."""
MODES = ("disaggregated", "aggregated, chunked", "aggregated, whole")


class Outcome(NamedTuple):
    """What one deployment gave: the streams' requests, the long ones, and the seconds."""

    streams: list[Sample]
    long: list[Sample]
    seconds: float

    def figures(self) -> dict[str, float]:
        tpot = [1000 * sample.tpot for sample in self.streams]
        gaps = [1000 * gap for sample in self.streams for gap in sample.gaps]
        return {
            "TPOT P50, ms": percentile(tpot, 50),
            "TPOT P99, ms": percentile(tpot, 99),
            "ITL P99, ms": percentile(gaps, 99),
            "ITL max, ms": max(gaps),
            "TTFT P50 of long prompts, ms": percentile([1000 * s.ttft for s in self.long], 50),
            "streams' output, tokens/s": sum(s.tokens for s in self.streams) / self.seconds,
        }


def main() -> int:
    args = parse()
    pin(args.threads)
    path = str(model_dir(args.model))
    outcomes: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
    with ExitStack() as held:
        urls: dict[str, str] = {}
        for mode in MODES:
            print(f"starting: {mode}", file=sys.stderr, flush=True)
            urls[mode] = held.enter_context(deployment([path, *options(mode, args)]))
        for number in range(args.rounds):
            for mode, url in urls.items():
                outcomes[mode].append(load(url, args, seed=ROUND_SEEDS * number))
                tell(mode, number + 1, args.rounds, outcomes[mode][-1])
    figures = {mode: together(rounds).figures() for mode, rounds in outcomes.items()}
    draw(args, figures)
    publish(result_name("interference", args), rows(figures))
    return 0


def together(rounds: Sequence[Outcome]) -> Outcome:
    """All rounds as one."""
    return Outcome(
        [sample for one in rounds for sample in one.streams],
        [sample for one in rounds for sample in one.long],
        sum(one.seconds for one in rounds),
    )


def tell(mode: str, number: int, rounds: int, outcome: Outcome) -> None:
    """One line a round."""
    told = ", ".join(f"{name.rpartition(',')[0]} {v:.1f}" for name, v in outcome.figures().items())
    print(f"{mode}, round {number} of {rounds}: {told}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    add_charts(parser)
    parser.add_argument("--model", default=SMOLLM2, help=f"default: {SMOLLM2}")
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--tokens", type=int, default=64, metavar="N",
                        help="of one answer of a stream (default: 64)")  # fmt: skip
    parser.add_argument("--prompt", type=int, default=4000, metavar="N",
                        help="tokens of a long prompt (default: 4000)")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=8, metavar="N",
                        help="long prompts in all (default: 8)")  # fmt: skip
    parser.add_argument("--interval", type=float, default=10.0, metavar="SECONDS",
                        help="from one long prompt to the next (default: 10)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="default: 2")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
        args.streams, args.tokens, args.prompts, args.prompt, args.interval = 2, 8, 2, 600, 2.0
    return args


def options(mode: str, args: argparse.Namespace) -> list[str]:
    """Of `ekiden up`. The threads of all ranks add up to ``args.threads``."""
    whole = args.prompt + SPARE_LENGTH
    step = whole if mode == "aggregated, whole" else CHUNK
    common = ["--max-model-len", str(whole), "--max-num-batched-tokens", str(step)]
    if mode == "disaggregated":
        pools, threads = ["--prefill", "1", "--prefill-tp", "1"], max(1, args.threads // 2)
    else:
        pools, threads = ["--prefill", "0"], args.threads
    return [*common, *pools, "--threads-per-rank", str(threads)]


def load(url: str, args: argparse.Namespace, seed: int) -> Outcome:
    """Streams run from before the first long prompt until the last one is answered.

    ``seed`` decides the prompts: one that was used before would find its prompts in the cache.
    """
    stop = Event()
    with client(url) as asked, ThreadPoolExecutor(args.streams) as pool:
        warm_up(asked, args, random.Random(seed + WARM_UP))
        running = [
            pool.submit(stream, asked, args.tokens, random.Random(seed + own), stop)
            for own in range(1, args.streams + 1)
        ]
        try:
            began = time.monotonic()
            long = long_prompts(asked, args, random.Random(seed))
            ended = time.monotonic()
        finally:
            stop.set()
        found = list(itertools.chain.from_iterable(future.result() for future in running))
    counted = [sample for when, sample in found if began < when <= ended]
    return Outcome(counted, long, ended - began)


def warm_up(asked: Client, args: argparse.Namespace, chance: random.Random) -> None:
    """First-time costs, on both ways through the deployment."""
    asked.ask(prompt_of(chance, STREAM_PROMPT), LONG_ANSWER)
    asked.ask(prompt_of(chance, args.prompt // 4), LONG_ANSWER)


def stream(
    asked: Client, tokens: int, chance: random.Random, stop: Event
) -> list[tuple[float, Sample]]:
    """One answer after another until ``stop``, each with the moment at which it ended."""
    found = []
    while not stop.is_set():
        sample = asked.ask(prompt_of(chance, STREAM_PROMPT), tokens)
        found.append((time.monotonic(), sample))
    return found


def long_prompts(asked: Client, args: argparse.Namespace, chance: random.Random) -> list[Sample]:
    """Sent at their times, whether or not the one before is answered; all answers."""
    sent, began = [], time.monotonic()
    for number in range(args.prompts):
        time.sleep(max(0.0, began + number * args.interval - time.monotonic()))
        sent.append(asked.submit(prompt_of(chance, args.prompt), LONG_ANSWER))
    answers = []
    for number, future in enumerate(sent, 1):
        answers.append(future.result())
        print(f"long prompt {number} of {args.prompts} answered", file=sys.stderr, flush=True)
    return answers


def rows(figures: dict[str, dict[str, float]]) -> list[Row]:
    """Disaggregated as ours, the others as peers; a ratio below 1 is better but for the output."""
    mine, *others = MODES
    found = []
    for name, value in figures[mine].items():
        what, _, unit = name.rpartition(", ")
        found += [row(what, value, unit, peer=figures[o][name], peer_name=o) for o in others]
    return found


def draw(args: argparse.Namespace, figures: dict[str, dict[str, float]]) -> None:
    shown: Sequence[str] = ("TPOT P50, ms", "TPOT P99, ms", "ITL P99, ms")
    title = f"{args.streams} streams while prompts of {args.prompt:,} tokens arrive"
    values = {mode: [figures[mode][name] for name in shown] for mode in MODES}
    groups = [name.removesuffix(", ms") for name in shown]
    path = args.charts / f"{result_name('interference', args)}.svg"
    chart.write(path, bars(title, "ms", groups, values, show=figure))


if __name__ == "__main__":
    sys.exit(main())
