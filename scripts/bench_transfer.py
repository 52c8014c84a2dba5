"""`make bench-transfer`: how fast KV moves between two processes, beside what else could move it.

A cache in the shape of Llama-3.1-8B's (32 layers, 8 KV heads of 128, bf16, 2 MiB a block of 16
tokens), scattered blocks, a sending and a receiving process with a core each. Ours are real ports
and sessions over each wire, from the order to send until the KV is there, counted and sealed; the
peers are C's memcpy by one thread, plain TCP sockets, NIXL's READ, and our ucx wire with UCX's own
settings. All take turns; pages are touched, connections made and the bytes compared before. A turn
is the best of some transfers in a row, and what counts is the median of the turns.

Then what a hand-off costs over the whole stack. Writes build/bench/transfer.json and a chart.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import transfer_rows as rows_of
from benchmarks import transfer_stack as stack
from benchmarks.options import add_charts, result_name
from benchmarks.results import Row, figure, publish
from benchmarks.rounds import spread, turned
from benchmarks.transfer_link import Setup, two_cores
from benchmarks.transfer_peers import BUFFERS
from benchmarks.transfer_rows import MEMCPY, NIXL, SHM, SOCKETS, TCP, UCX, UNTUNED, resharded
from benchmarks.transfer_shape import BLOCK, TOKENS, Sources
from benchmarks.worker import Worker

EXAMPLES = """examples:
  make bench-transfer
  make bench-transfer ARGS="--tokens 1000 --rounds 9 --no-stack"
  make bench-transfer ARGS="--quick"
"""
POOL_BLOCKS, QUICK_POOL_BLOCKS = 512, 96
TURN_TOKENS, QUICK_TURN_TOKENS = 8000, 1000
"""Moved in one turn, in as many transfers as fit ..."""
MOST_TRANSFERS = 8
"""... but no more."""
QUIET_LOAD = 1.0
TRACED_TOKENS = 1000
PYTHON_KIB = 256.0
"""Python objects may grow by this while 131 MB move; a message has 4 MiB."""


class Plan(NamedTuple):
    """How much is measured; ``nixl``: it is installed."""

    rounds: int
    turn_tokens: int
    nixl: bool

    def turns(self, tokens: int, number: int) -> list[int]:
        """Of the transfers in a round: which blocks each takes."""
        count = min(max(self.turn_tokens // tokens, 1), MOST_TRANSFERS)
        return list(range(number * count, (number + 1) * count))


class Contender(NamedTuple):
    """Who moves: a worker, and what it is told."""

    name: str
    worker: Worker
    how: dict[str, Any]

    def best(self, tokens: int, turns: list[int]) -> float:
        """Bytes a second of the fastest transfer. Raises WorkerFailed."""
        rates = self.worker.call("move", tokens=tokens, turns=turns, **self.how)["rates"]
        return float(max(rates))

    def check(self, tokens: int) -> None:
        """Raises WorkerFailed: what arrives is not what was sent."""
        self.worker.call("check", tokens=tokens, turn=0, **self.how)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    tell_load()
    plan = Plan(args.rounds, QUICK_TURN_TOKENS if args.quick else TURN_TOKENS, has_nixl())
    found: list[Row] = []
    with ExitStack() as held:
        workers = start(args, held, nixl=plan.nixl)
        measured = {tokens: measure(workers, tokens, plan) for tokens in args.tokens}
        found += rows_of.transfer_rows(measured, nixl=plan.nixl)
        found += [python_row(workers["ours"], wire) for wire in (SHM, TCP, UCX)]
    found += [] if args.no_stack else stack_rows(args)
    publish(result_name("transfer", args), found)
    rows_of.draw(args.charts / f"{result_name('transfer', args)}.svg", measured)
    return 0


def tell_load() -> None:
    """Others that compute take the two cores in turns with us, and no figure is left to trust."""
    if (load := os.getloadavg()[0]) > QUIET_LOAD:
        print(f"the load is {load:.1f} already: the figures mean little", file=sys.stderr)


def has_nixl() -> bool:
    return importlib.util.find_spec("nixl_cu12") is not None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=numbers, default=TOKENS, metavar="N,...",
                        help=f"default: {','.join(map(str, TOKENS))}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="that count, after one of warm-up (default: 5)")  # fmt: skip
    parser.add_argument("--no-stack", action="store_true", help="transfers only")
    parser.add_argument("--quick", action="store_true",
                        help="little work, to see that everything runs")  # fmt: skip
    add_charts(parser)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = (128, 1000), 1
    longest = POOL_BLOCKS * BLOCK
    if not all(0 < tokens <= longest for tokens in args.tokens):
        parser.error(f"--tokens {args.tokens}: choose numbers from 1 to {longest}")
    return args


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def start(args: argparse.Namespace, held: ExitStack, *, nixl: bool) -> dict[str, Worker]:
    """The receivers, which have started their senders."""
    pool_blocks = QUICK_POOL_BLOCKS if args.quick else POOL_BLOCKS
    sources = Sources(pool_blocks)
    held.callback(sources.close)
    setup = Setup(
        sources=sources.paths(), pool_blocks=pool_blocks, cores=two_cores(),
        untuned=ucx_defaults(), nixl=nixl,
    )  # fmt: skip
    workers = {}
    for kind in ("peers", "ours"):
        workers[kind] = Worker(f"transfer-{kind}", "transfer_worker", [kind, setup.text()])
        held.callback(workers[kind].close)
    return workers


def ucx_defaults() -> dict[str, str]:
    """UCX's own values of the options that the ucx wire sets, but over TCP as it is."""
    import libucx

    from kv_transfer.transports.ucx import SETTINGS

    home = Path(libucx.__file__).parent
    told = subprocess.run(
        [home / "bin" / "ucx_info", "-c"], capture_output=True, text=True, check=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(home / "lib")},
    ).stdout  # fmt: skip
    known = dict(line.split("=", 1) for line in told.splitlines() if line.startswith("UCX_"))
    names = [f"UCX_{name}" for name in SETTINGS if name != "TLS"]
    return {name: known[name] for name in names} | {"UCX_TLS": SETTINGS["TLS"]}


def contenders(workers: dict[str, Worker], buffer: int, *, nixl: bool) -> list[Contender]:
    """Peers and ours in turns. ``buffer``: of the plain sockets."""
    peers, ours = workers["peers"], workers["ours"]
    all_ = [
        Contender(MEMCPY, peers, {"way": "memcpy"}),
        Contender(SHM, ours, {"wire": SHM}),
        Contender(NIXL, peers, {"way": "nixl"}),
        Contender(resharded(SHM), ours, {"wire": SHM, "group": "TP2"}),
        Contender(SOCKETS, peers, {"way": f"tcp {buffer}"}),
        Contender(UCX, ours, {"wire": UCX}),
        Contender(UNTUNED, ours, {"wire": UCX, "group": "untuned"}),
        Contender(resharded(UCX), ours, {"wire": UCX, "group": "TP2"}),
        Contender(TCP, ours, {"wire": TCP}),
        Contender(resharded(TCP), ours, {"wire": TCP, "group": "TP2"}),
    ]
    return [one for one in all_ if nixl or one.name != NIXL]


def measure(workers: dict[str, Worker], tokens: int, plan: Plan) -> dict[str, list[float]]:
    """Bytes a second of each in every round, after one that is not counted."""
    buffer = best_buffer(workers["peers"], tokens, plan)
    all_ = contenders(workers, buffer, nixl=plan.nixl)
    for one in all_:
        one.check(tokens)
    rates: dict[str, list[float]] = {one.name: [] for one in all_}
    for number in range(plan.rounds + 1):
        for one in turned(all_, number):
            rate = one.best(tokens, plan.turns(tokens, number))
            if number:
                rates[one.name].append(rate)
    for name, found in rates.items():
        told = f"{figure(sorted(found)[len(found) // 2] / 1e9)} GB/s, spread {spread(found):.0%}"
        print(f"{tokens:,} tokens, {name}: {told}", file=sys.stderr, flush=True)
    return rates


def best_buffer(worker: Worker, tokens: int, plan: Plan) -> int:
    """Of plain sockets, the size with the best of two turns."""
    ways = {buffer: Contender(SOCKETS, worker, {"way": f"tcp {buffer}"}) for buffer in BUFFERS}
    turns = plan.turns(tokens, 0) + plan.turns(tokens, 1)
    return max(ways, key=lambda buffer: ways[buffer].best(tokens, turns))


def python_row(worker: Worker, wire: str, tokens: int = TRACED_TOKENS) -> Row:
    """By ``tracemalloc``, in the process where they grew more."""
    grown = worker.call("trace", tokens=tokens, wire=wire)["bytes"]
    name = f"growth of Python objects while {tokens:,} tokens move, {wire}"
    return rows_of.at_most(name, grown / 1024, "KiB", PYTHON_KIB)


def stack_rows(args: argparse.Namespace) -> list[Row]:
    found = stack.one_block(8 if args.quick else 60)
    for wire in (SHM, TCP, UCX):
        if args.quick:
            found.append(stack.exposed_row(wire, None))
        else:
            found += stack.exposed(wire, samples=2)
    return found


if __name__ == "__main__":
    sys.exit(main())
