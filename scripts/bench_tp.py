"""`make bench-tp`: TP2 with one thread a rank against TP1 with two threads, on the same two cores.

Both are processes that talk through shared memory, as in a service. The share of a step that is
spent in all-reduces comes from the engine's own counters. Writes build/bench/tp.json and tp.svg.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from benchmarks import chart
from benchmarks.comparison import UNIT, WORKS
from benchmarks.contenders import Contender, Stepped, ours, started
from benchmarks.models import MODELS, model_dir
from benchmarks.options import add_charts, add_common, names, pin, result_name
from benchmarks.results import Row, figure, publish, row
from benchmarks.rounds import Plan, alternate, medians
from benchmarks.work import Decode, Prefill, Work

from ekiden.plots.bars import bars

EXAMPLES = """examples:
  make bench-tp
  make bench-tp ARGS="--models random-1.1b --charts docs/charts"
"""
QUICK: tuple[Work, ...] = (Prefill(128), Decode(2))
COUNTERS = ("compute_s", "collective_s", "steps")


def main() -> int:
    args = parse()
    pin(args.threads)
    rows: list[Row] = []
    for model in args.models:
        rows += compare(model, model_dir(model), args)
    publish(result_name("tp", args), rows)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    add_charts(parser)
    parser.add_argument("--models", type=names, default=list(MODELS), metavar="A,B",
                        help=f"default: {','.join(MODELS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="that count, after one of warm-up (default: 5)")  # fmt: skip
    args = parser.parse_args()
    args.works, args.steps = WORKS, 16
    if args.quick:
        args.works, args.models, args.rounds, args.steps = QUICK, args.models[:1], 1, 4
    return args


def compare(model: str, path: Path, args: argparse.Namespace) -> list[Row]:
    one, split = "TP1", f"TP{args.threads}"
    start = partial(ours, path, args.threads, processes=True)
    made = [
        started(one, path, partial(start, name=one)),
        started(split, path, partial(start, name=split, tp=args.threads)),
    ]
    contenders = [contender for contender in made if contender is not None]
    rates: dict[Work, dict[str, float]] = {}
    shares: dict[Work, float | None] = {}
    try:
        for work in args.works:
            counts: Counter[str] = Counter()
            heard = partial(count, counts, split)
            rates[work] = medians(alternate(contenders, work, Plan(args.rounds, args.steps), heard))
            shares[work] = share(counts)
    finally:
        for contender in contenders:
            contender.end()
    draw(model, args, rates, (one, split))
    return rows(model, rates, shares, (one, split))


def count(counts: Counter[str], name: str, contender: Contender) -> None:
    """Add up what the engine called ``name`` says of its latest run."""
    if isinstance(contender, Stepped) and contender.name == name:
        counts.update({counter: contender.last.get(counter, 0.0) for counter in COUNTERS})


def share(counts: Counter[str]) -> float | None:
    """Of the steps' time, what was spent in all-reduces."""
    return counts["collective_s"] / counts["compute_s"] if counts["compute_s"] else None


def rows(
    model: str,
    rates: dict[Work, dict[str, float]],
    shares: dict[Work, float | None],
    names: tuple[str, str],
) -> list[Row]:
    one, split = names
    found = []
    for work, of in rates.items():
        name = f"{model}, {work}, {split}"
        found.append(row(name, of.get(split), UNIT, peer=of.get(one), peer_name=one))
        part = shares[work]
        found.append(row(f"{name}, in all-reduce", None if part is None else 100 * part, "%"))
    return found


def draw(
    model: str,
    args: argparse.Namespace,
    rates: dict[Work, dict[str, float]],
    names: tuple[str, str],
) -> None:
    """How the split engine stands to the other, by kind of work."""
    one, split = names
    ratios = {str(work): of[split] / of[one] for work, of in rates.items() if len(of) == 2}
    if ratios:
        title = f"{model}: {split} over {one}, the same {args.threads} cores"
        values = {f"{split} / {one}": list(ratios.values())}
        path = args.charts / f"{result_name(f'tp-{Path(model).name}', args)}.svg"
        chart.write(path, bars(title, "ratio", list(ratios), values, show=figure))


if __name__ == "__main__":
    sys.exit(main())
