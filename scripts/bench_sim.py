"""`make bench-sim`: how much faster than life `ekiden sim` is.

A recorded trace at its own speed through 1,000 replicas, in seconds of the simulation for one of
this machine; then a pool under load, where replicas work all the time. Without --trace a trace of
conversations is drawn: turns that grow, each of which begins with all that was said before. Writes
build/bench/sim.json.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import result_name
from benchmarks.results import Row, publish, row

from ekiden.planner.calibration import calibration
from ekiden.planner.catalogue import geometry
from ekiden.planner.devices import devices
from ekiden.planner.hardware import gpu
from ekiden.planner.limits import Limits
from ekiden.planner.memory import Replica
from ekiden.planner.steps import Stepper
from ekiden.planner.trace import BLOCK, Line, read_trace
from ekiden.sim.asked import Asked, replayed
from ekiden.sim.run import longest, simulate
from ekiden.sim.scenario import Scenario

REPLICAS, PREFILL = 1000, 250
BUSY_REPLICAS, BUSY_PREFILL = 16, 6
GOAL = 20.0
"""Simulated seconds a second, at 1,000 replicas."""
DRAWN_S, DRAWN_RATE = 3600.0, 3.4
MODEL, GPU = "Llama-3.1-8B", "H100"


def main() -> int:
    args = parse()
    lines = read_trace(args.trace) if args.trace else drawn()
    lines = lines[: args.requests] if args.requests else lines
    one = stepper()
    rows: list[Row] = []
    for block in args.block_sizes:
        idle = scenario(one, PREFILL, REPLICAS - PREFILL, block)
        rows += measured(f"{REPLICAS} replicas, blocks of {block}", idle, lines, goal=GOAL)
    busy = scenario(one, BUSY_PREFILL, BUSY_REPLICAS - BUSY_PREFILL, args.block_sizes[0])
    rows += measured(f"{BUSY_REPLICAS} replicas, blocks of {args.block_sizes[0]}", busy, lines)
    args.quick = bool(args.requests)
    publish(result_name("sim", args), rows)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help="JSON lines, as `ekiden sim --trace` takes them")  # fmt: skip
    parser.add_argument("--requests", type=int, metavar="N", help="the first N only")
    parser.add_argument("--block-sizes", type=numbers, default=(64, 16), metavar="N,...",
                        help="default: 64,16")  # fmt: skip
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def stepper() -> Stepper:
    machines = devices(gpu(GPU), per_host=8)
    replica = Replica(
        geometry=geometry(MODEL),
        card=machines.card,
        limits=Limits(max_model_len=131_072, max_num_seqs=256, chunk=2048),
    )
    return Stepper(replica, machines, calibration("vllm"))


def scenario(one: Stepper, prefill: int, decode: int, block: int) -> Scenario:
    return Scenario(
        prefill=prefill, decode=decode, prefill_stepper=one, decode_stepper=one, block_size=block
    )


def measured(
    name: str, world: Scenario, lines: Sequence[Line], goal: float | None = None
) -> list[Row]:
    """Simulated seconds a second of wall time, and of this process's time on its core."""
    asked: list[Asked] = replayed(lines, longest=longest(world))
    wall, core = time.perf_counter(), time.process_time()
    outcome = simulate(world, asked)
    wall, core = time.perf_counter() - wall, time.process_time() - core
    failed = sum(not record.ok for record in outcome.records)
    if failed:
        sys.exit(f"{name}: {failed} of {len(asked)} requests failed, which nothing explains")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{name}: {len(asked)} requests, {outcome.seconds:,.0f} s simulated in {wall:.1f} s "
        f"({core:.1f} s of a core, load {os.getloadavg()[0]:.1f}), {peak:.1f} GB at most",
        file=sys.stderr,
    )
    real = {"peer": 1.0, "peer_name": "real time", "goal": goal}
    return [
        row(f"simulated seconds a second, {name}", outcome.seconds / wall, "s/s", **real),
        row(f"simulated seconds a core second, {name}", outcome.seconds / core, "s/s"),
    ]


def drawn() -> list[Line]:
    """Conversations that overlap: their first block is everybody's."""
    rng, lines, names = random.Random(1), [], iter(range(1, 1 << 30))
    for _ in range(int(DRAWN_S * DRAWN_RATE / 3)):
        at, ids = rng.uniform(0, DRAWN_S), (0,)
        for _ in range(rng.choice((1, 2, 3, 6))):
            ids += tuple(next(names) for _ in range(rng.choice((4, 10, 24))))
            length = min(len(ids) * BLOCK - rng.randrange(BLOCK), 120_000)
            shown = ids[: -(-length // BLOCK)]
            output = max(1, round(rng.gauss(350, 150)))
            lines.append(
                Line(timestamp=at * 1e3, input_length=length, output_length=output, hash_ids=shown)
            )
            at += rng.expovariate(1 / 60)
    return sorted(lines, key=lambda line: line.timestamp)


if __name__ == "__main__":
    sys.exit(main())
