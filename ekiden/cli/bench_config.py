"""From the options of ``ekiden bench`` to what is measured."""

from __future__ import annotations

import argparse
import math
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from ekiden.bench.arrivals import ARRIVALS
from ekiden.bench.workload import NAMED, Drawn, Shape
from ekiden.core import env
from ekiden.core.errors import SetupError

if TYPE_CHECKING:
    from ekiden.bench.config import BenchConfig, Load
    from ekiden.bench.trace import Traced
    from ekiden.measures.goodput import Slo

WORKLOADS = tuple(NAMED)
DEFAULT_COUNT = 100
DEFAULT_BURST = 8
_FOR_DRAWN = "is for prompts that are drawn, and --trace has its own: leave one of them out"
_NEEDS = {
    "--workload": _FOR_DRAWN,
    "--prompt-tokens": _FOR_DRAWN,
    "--output-tokens": _FOR_DRAWN,
    "--shared-prefix-tokens": _FOR_DRAWN,
    "--max-model-len": "leaves out requests of a trace: give --trace FILE",
    "--trace-speed": "replays a trace by its own moments: give --trace FILE, and no --concurrency",
    "--burst-size": "needs --arrival burst and a --rate",
    "--arrival": "is of an open loop: give --rate R",
    "--prefixes": "needs --shared-prefix-tokens",
}
"""What an option is for, where another one makes it idle."""


def _refuse_idle(args: argparse.Namespace) -> None:
    """An option that another one makes idle would be passed over without a word."""
    traced, bursts = bool(args.trace), args.arrival == "burst" and bool(args.rate)
    replayed = traced and not args.concurrency
    idle = {
        "--workload": traced and args.workload != WORKLOADS[0],
        "--prompt-tokens": traced and args.prompt_tokens,
        "--output-tokens": traced and args.output_tokens,
        "--shared-prefix-tokens": traced and args.shared_prefix_tokens,
        "--max-model-len": not traced and args.max_model_len,
        "--trace-speed": not replayed and args.trace_speed != (1.0,),
        "--burst-size": not bursts and args.burst_size != DEFAULT_BURST,
        "--arrival": not args.rate and args.arrival != ARRIVALS[0],
        "--prefixes": not args.shared_prefix_tokens and args.prefixes != 1,
    }
    for option, is_idle in idle.items():
        if is_idle:
            raise SetupError(f"{option} {_NEEDS[option]}")


def config_of(args: argparse.Namespace) -> BenchConfig:
    """Raises SetupError for options that contradict one another, or a trace that cannot be read."""
    from ekiden.bench.asking import Dialect
    from ekiden.bench.config import BenchConfig

    _refuse_idle(args)
    loads = _loads(args)
    workload, name = _workload(args)
    return BenchConfig(
        url=args.base_url,
        model=args.model,
        api_key=args.api_key or env.api_key(),
        dialect=Dialect(endpoint=args.endpoint, ignore_eos=args.ignore_eos, extra=args.extra_body),
        tokenizer=args.tokenizer,
        workload=workload,
        workload_name=name,
        loads=loads,
        arrival={"rate": args.arrival, "concurrency": "closed"}.get(loads[0].kind, "trace"),
        burst=args.burst_size,
        seed=args.seed,
        count=_count(args),
        duration_s=args.duration,
        warmups=args.num_warmups,
        processes=args.processes,
        max_in_flight=args.max_in_flight,
        timeout_s=args.timeout,
        slo=_limits(args.slo),
    )


def _workload(args: argparse.Namespace) -> tuple[Drawn | Traced, str]:
    """What is asked, and its name."""
    from ekiden.bench.trace import Traced

    salt = "" if args.repeat_prompts else secrets.token_hex(4)
    if args.trace:
        traced = Traced(path=args.trace, max_len=args.max_model_len, seed=args.seed, salt=salt)
        return traced, f"trace {Path(args.trace).name}, {traced.size} requests"
    shapes = tuple(
        Shape(args.prompt_tokens or shape.prompt, args.output_tokens or shape.output)
        for shape in NAMED[args.workload]
    )
    drawn = Drawn(
        shapes=shapes,
        shared_prefix=args.shared_prefix_tokens,
        prefixes=args.prefixes,
        seed=args.seed,
        salt=salt,
    )
    lengths = ", ".join(f"{shape.prompt}/{shape.output}" for shape in dict.fromkeys(shapes))
    shared = f", {args.shared_prefix_tokens} tokens shared" if args.shared_prefix_tokens else ""
    return drawn, f"{args.workload} ({lengths}{shared})"


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    from ekiden.bench.config import Load

    if args.rate and (args.concurrency or args.trace):
        other = "--concurrency" if args.concurrency else "--trace"
        raise SetupError(f"--rate and {other} each say when requests are sent: choose one")
    if math.inf in args.rate and not args.num_prompts:
        raise SetupError("--rate inf sends all requests at once: say how many with --num-prompts")
    if args.rate:
        return tuple(Load(kind="rate", value=value) for value in args.rate)
    if args.trace and not args.concurrency:
        return tuple(Load(kind="trace", value=value) for value in args.trace_speed)
    return tuple(Load(kind="concurrency", value=value) for value in args.concurrency or (8,))


def _count(args: argparse.Namespace) -> int:
    if args.num_prompts or args.duration or (args.trace and not args.concurrency):
        return args.num_prompts or 0
    return DEFAULT_COUNT


def _limits(parts: dict[str, float]) -> Slo:
    from ekiden.measures.goodput import Slo

    return Slo(**{f"{name}_ms": value for name, value in parts.items()})
