"""`make bench-engine`: our engine beside its peers on this machine, in turns, in one run.

Every engine does the same work on the same cores: a prompt of 512 and of 2,048 tokens to its first
token, and decode steps at batch 1, 8 and 32 over about 128 tokens of context. One round is one
turn of each engine; what counts is the median over rounds. A floor stands beside each figure: bytes
over the measured read rate or operations over the measured GEMM rate, whichever takes longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks import comparison
from benchmarks.comparison import PEERS, QUANTISED, WORKS, Measured
from benchmarks.contenders import LLAMA, OURS, Contender, Peers, ours, started
from benchmarks.machine import Machine, best, measure
from benchmarks.models import MODELS, Shape, model_dir
from benchmarks.options import add_common, add_peers, names, pin, result_name
from benchmarks.results import Row, publish
from benchmarks.rounds import Plan, alternate, widest_spread
from benchmarks.work import Decode, Prefill, Work

from ekiden.core.config import EngineConfig

EXAMPLES = """examples:
  make bench-engine
  make bench-engine ARGS="--vllm-python PATH/bin/python"
  make bench-engine ARGS="--llama-bench PATH/build/bin/llama-bench --gguf PATH/models"
  make bench-engine ARGS="--work prefill-512,decode-1 --rounds 9"
  make bench-engine ARGS="--quick"

--gguf DIR holds MODEL-BF16.gguf, MODEL-Q8_0.gguf and MODEL-Q4_0.gguf; docs/benchmarks.md says how
to make them. Peers whose paths are not given are shown as "not measured".
"""
BUSY_SPREAD = 0.3
"""A line that varies by more was disturbed."""
QUICK: tuple[Work, ...] = (Prefill(128), Decode(1), Decode(2))
BY_NAME = {work.name: work for work in WORKS}
SMALL_WEIGHTS = "quantised"
"""The name of batch 1 with int8 and int4 weights."""


def main() -> int:
    args = parse()
    pin(args.threads)
    peers = Peers(vllm_python=args.vllm_python, llama_bench=args.llama_bench, gguf=args.gguf,
                  threads=args.threads)  # fmt: skip
    plan = Plan(rounds=args.rounds, steps=args.steps)
    machines = [measure(args.threads)]
    measured: list[Measured] = []
    quantised: dict[str, dict[str, list[float]]] = {}
    for model in args.models:
        path = model_dir(model)
        measured += compare(model, path, peers, args.works, plan, args.engines)
        if SMALL_WEIGHTS in args.work:
            quantised[model] = compare_quantised(model, path, peers, args, plan)
        machines.append(measure(args.threads))
    finish(measured, quantised, best(machines), args)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    add_peers(parser)
    parser.add_argument("--models", type=names, default=list(MODELS), metavar="A,B",
                        help=f"default: {','.join(MODELS)}; a directory will do")  # fmt: skip
    parser.add_argument("--engines", type=names, default=[OURS, *PEERS], metavar="A,B",
                        help=f"of: {','.join((OURS, *PEERS))}")  # fmt: skip
    every = [*BY_NAME, SMALL_WEIGHTS]
    parser.add_argument("--work", type=names, default=every, metavar="A,B",
                        help=f"of: {','.join(every)}; a part of it is written to "
                        "engine-part.json")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="that count, after one of warm-up (default: 5)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=16, metavar="N",
                        help="decode steps of an engine in a round (default: 16)")  # fmt: skip
    args = parser.parse_args()
    if unknown := set(args.work) - set(every):
        parser.error(f"--work {','.join(sorted(unknown))} is unknown: choose of {','.join(every)}")
    args.works = [work for name, work in BY_NAME.items() if name in args.work]
    args.name = "engine" if len(args.work) == len(every) else "engine-part"
    if args.quick:
        args.works, args.models, args.rounds, args.steps = QUICK, args.models[:1], 2, 4
    return args


def compare(
    model: str,
    path: Path,
    peers: Peers,
    works: Sequence[Work],
    plan: Plan,
    engines: Sequence[str],
) -> list[Measured]:
    """All engines live at once, idle while another has its turn."""
    contenders = peers.start(model, path, engines)
    shape = Shape.of(path)
    try:
        return [Measured(model, shape, work, alternate(contenders, work, plan)) for work in works]
    finally:
        for contender in contenders:
            contender.end()


def compare_quantised(
    model: str, path: Path, peers: Peers, args: argparse.Namespace, plan: Plan
) -> dict[str, list[float]]:
    """Batch 1 of our quantised weights and llama.cpp's, as far as both are to be had."""
    contenders = [engine for engine in quantised_engines(model, path, peers, args) if engine]
    try:
        return alternate(contenders, Decode(1), plan)
    finally:
        for contender in contenders:
            contender.end()


def quantised_engines(
    model: str, path: Path, peers: Peers, args: argparse.Namespace
) -> Iterator[Contender | None]:
    for mine, theirs, _ in QUANTISED:
        if OURS in args.engines and "quantization" in EngineConfig.__struct_fields__:
            name, settings = f"{OURS} {mine}", {"quantization": mine}
            yield started(
                name, path, partial(ours, path, args.threads, name=name, settings=settings)
            )
        if LLAMA in args.engines:
            name = f"{LLAMA} {theirs}"
            yield started(name, path, partial(peers.llama, model, theirs, name))


def finish(
    measured: Sequence[Measured],
    quantised: dict[str, dict[str, list[float]]],
    machine: Machine,
    args: argparse.Namespace,
) -> None:
    rows: list[Row] = comparison.machine_rows(machine, args.threads)
    rows += comparison.rows(measured, machine)
    for model, rates in quantised.items():
        rows += comparison.quantised_rows(model, model_dir(model), rates, machine)
    print(f"\ntokens/s, medians\n\n{comparison.grid(measured, machine)}")
    if widest_spread([one.rates for one in measured]) > BUSY_SPREAD:
        print("\nThe rounds differ widely: other work ran on this machine, and this says little.")
    publish(result_name(args.name, args), rows)


if __name__ == "__main__":
    sys.exit(main())
