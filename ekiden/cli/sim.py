"""``ekiden sim``: traffic through simulated replicas, by the real router and the real scheduler."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from ekiden.cli.bar import Bar
from ekiden.cli.command import add_command
from ekiden.cli.sim_options import add_simulation
from ekiden.cli.sim_question import requests, runs, slo, subject

if TYPE_CHECKING:
    from ekiden.planner.options import Asked as Question
    from ekiden.sim.figures import Figures

_EXAMPLES = """examples:
  ekiden sim Llama-3.1-8B --gpu H100 --trace conversation_trace.jsonl --replicas 8 \\
      --ratio 1:3,2:2,3:1,0:4 --slo ttft=2000,tpot=50             which ratio serves it best
  ekiden sim Llama-3.1-8B --gpu H100 --workload rag --rate 8 --ratio 0:8 \\
      --policy router,round-robin,least-requests                  what the router is worth
  ekiden sim Llama-3.1-70B -tp 4 --gpu H100 --gpus-per-host 8 --rate 20 --ratio 50:150 \\
      --mtbf 2000 --mttr 120                                      replicas that die now and then
  ekiden sim Llama-3.1-8B --gpu A6000 --rate 60 --requests 6000 --ratio 0:2 \\
      --autoscale 2:20 --start-delay 30                           a pool that grows too late
  ekiden sim Llama-3.1-8B --gpu H100 --rate 8 --ratio 4:4 --kill decode-0@30 --json
  ekiden sim Qwen3-30B-A3B --gpu H100 --gpus-per-host 8 -dp 8 --enable-expert-parallel \\
      --rate 40 --expert-skew 1                                   ranks that wait for hot experts

The gateway's router, the engine's scheduler, its block pool and its prefix cache are the real code;
steps, links and failures are modelled, as docs/sim.md tells. Times come from the planner's latency
model and are as good as its --calibration.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "sim", "simulate traffic through pools of replicas", _EXAMPLES)
    add_simulation(parser)
    parser.add_argument("--json", action="store_true", help="print plain data, not a table")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """0; 1 where a run answered nothing."""
    from ekiden.sim.figures import figures
    from ekiden.sim.run import simulate

    asked_for = subject(args)
    planned = [(name, one, *requests(args, one)) for name, one in runs(args, asked_for)]
    found: list[Figures] = []
    bar = Bar(unit=lambda total: f"{total} requests")
    try:
        for name, scenario, asked, left_out in planned:
            outcome = simulate(scenario, asked, partial(bar, name))
            found.append(figures(name, outcome, slo(args), left_out=left_out))
    finally:
        bar.close()
    _tell(args, asked_for, found)
    return 0 if all(run.succeeded for run in found) else 1


def _tell(args: argparse.Namespace, asked_for: Question, found: list[Figures]) -> None:
    import msgspec

    from ekiden.sim.figures import SCHEMA
    from ekiden.sim.table import table

    if args.json:
        about = {
            "schema": SCHEMA,
            "model": asked_for.geometry.name,
            "workload": _workload(args, asked_for),
            "arrival": "trace" if args.trace else "poisson",
            "seed": args.seed,
        }
        data = msgspec.json.encode({**about, "runs": found})
        sys.stdout.write(msgspec.json.format(data).decode() + "\n")
    else:
        print(table(found))


def _workload(args: argparse.Namespace, asked_for: Question) -> str:
    """In the words of ``ekiden bench``."""
    if args.trace:
        return f"{args.trace} at {args.trace_speed:g}"
    lengths = ", ".join(f"{kind.prompt}/{kind.output}" for kind in asked_for.work.kinds)
    return f"{asked_for.work.name} ({lengths})"
