"""`make bench-streams`: output tokens a second at 1 to 32 streams, as a chart.

The bare engine, and the peers whose paths are given, decode with about 128 tokens of context in
each stream. Writes build/bench/streams.json and streams.svg.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import chart
from benchmarks.comparison import PEERS, UNIT
from benchmarks.contenders import OURS
from benchmarks.models import SMOLLM2, model_dir
from benchmarks.options import add_charts, add_common, add_peers, names, peers_of, pin, result_name
from benchmarks.results import Row, publish, row
from benchmarks.rounds import Plan, alternate, medians
from benchmarks.work import Decode

from ekiden.plots.lines import lines

EXAMPLES = """examples:
  make bench-streams
  make bench-streams ARGS="--vllm-python PATH/bin/python --charts docs/charts"
  make bench-streams ARGS="--model random-1.1b"
"""
STREAMS = (1, 2, 4, 8, 16, 32)


def main() -> int:
    args = parse()
    pin(args.threads)
    plan = Plan(rounds=1, steps=4) if args.quick else Plan(rounds=args.rounds, steps=16)
    contenders = peers_of(args).start(args.model, model_dir(args.model), args.engines)
    try:
        measured = {n: medians(alternate(contenders, Decode(n), plan)) for n in args.streams}
    finally:
        for contender in contenders:
            contender.end()
    draw(args, measured)
    publish(result_name("streams", args), rows(args.model, measured))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    add_peers(parser)
    add_charts(parser)
    parser.add_argument("--model", default=SMOLLM2, help=f"default: {SMOLLM2}")
    parser.add_argument("--engines", type=names, default=[OURS, *PEERS], metavar="A,B",
                        help=f"of: {','.join((OURS, *PEERS))}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="that count, after one of warm-up (default: 5)")  # fmt: skip
    args = parser.parse_args()
    args.streams = STREAMS[:2] if args.quick else STREAMS
    return args


def rows(model: str, measured: dict[int, dict[str, float]]) -> list[Row]:
    found = []
    for streams, rates in measured.items():
        name = f"{model}, {streams} streams"
        found += [
            row(name, rates.get(OURS), UNIT, peer=rates.get(peer), peer_name=peer) for peer in PEERS
        ]
    return found


def draw(args: argparse.Namespace, measured: dict[int, dict[str, float]]) -> None:
    points = {
        engine: [(n, rates[engine]) for n, rates in measured.items() if engine in rates]
        for engine in (OURS, *PEERS)
    }
    path: Path = args.charts / f"{result_name('streams', args)}.svg"
    title = f"{args.model}, {args.threads} threads: output by streams"
    drawn = {engine: line for engine, line in points.items() if line}
    chart.write(path, lines(title, "streams", UNIT, drawn, log=True))


if __name__ == "__main__":
    sys.exit(main())
