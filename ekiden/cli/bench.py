"""``ekiden bench``: load an OpenAI-compatible endpoint and tell what its users would have felt."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiden.cli.bar import Bar
from ekiden.cli.bench_verbs import add_compare, add_mock
from ekiden.cli.chat import DEFAULT_URL
from ekiden.cli.command import add_command
from ekiden.cli.options import at_least, seconds
from ekiden.core import env
from ekiden.core.errors import SetupError

if TYPE_CHECKING:
    from ekiden.bench.result import Result, Slo
    from ekiden.bench.sweep import BenchConfig, Load
    from ekiden.bench.trace import Traced
    from ekiden.bench.workload import Drawn

WORKLOADS = ("short-short", "short-long", "long-short", "long-long", "mixed")
ARRIVALS = ("poisson", "constant", "burst")
ENDPOINTS = ("completions", "chat")
SLO_PARTS = ("ttft", "tpot", "e2e")
DEFAULT_COUNT = 100

_EXAMPLES = """examples:
  ekiden bench                                       8 at a time against a local gateway
  ekiden bench --rate 1,2,4 --slo ttft=500,tpot=50 --html report.html
  ekiden bench --concurrency 1,8,32 --workload long-short --json build/long.json
  ekiden bench --trace conversation_trace.jsonl --trace-speed 0.5,1 --duration 300
  ekiden bench compare before.json after.json

The workloads are prompts and answers of 256/128 (short-short), 256/1024 (short-long), 8192/128
(long-short) and 8192/1024 tokens (long-long); mixed draws from all four. docs/bench.md defines
every figure. EKIDEN_API_KEY is sent where --api-key is not given.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "bench", "load an endpoint and measure its answers", _EXAMPLES)
    _add_target(parser)
    _add_workload(parser)
    _add_load(parser)
    _add_output(parser)
    parser.set_defaults(run=_run)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    add_compare(verbs)
    add_mock(verbs)


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default=DEFAULT_URL, metavar="URL",
        help=f"of any server with OpenAI's HTTP surface (default: {DEFAULT_URL})")  # fmt: skip
    add("--model", default="", metavar="NAME", help="default: the first that the server lists")
    add("--api-key", default="", metavar="KEY", help="sent as a bearer token")
    add("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0],
        help=f"(default: {ENDPOINTS[0]})")  # fmt: skip
    add("--tokenizer", type=Path, metavar="DIR",
        help="counts prompts where the server does not tell how many tokens it read")  # fmt: skip
    add("--no-ignore-eos", dest="ignore_eos", action="store_false",
        help="let answers end by themselves")  # fmt: skip
    add("--extra-body", type=_object, default={}, metavar="JSON",
        help="fields that every request has as well; null takes one away")  # fmt: skip
    add("--timeout", type=seconds, default=600.0, metavar="SECONDS",
        help="of a whole request (default: 600)")  # fmt: skip


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default=WORKLOADS[0],
        help=f"lengths of prompts and answers (default: {WORKLOADS[0]})")  # fmt: skip
    add("--prompt-tokens", type=at_least(1), metavar="N", help="instead of the workload's")
    add("--output-tokens", type=at_least(1), metavar="N", help="instead of the workload's")
    add("--shared-prefix-tokens", type=at_least(0), default=0, metavar="N",
        help="tokens with which prompts begin alike (default: 0)")  # fmt: skip
    add("--prefixes", type=at_least(1), default=1, metavar="N",
        help="different beginnings (default: 1)")  # fmt: skip
    add("--trace", metavar="FILE",
        help="replay recorded requests: JSON lines of timestamp, input_length, output_length, "
        "hash_ids")  # fmt: skip
    add("--max-model-len", type=at_least(0), default=0, metavar="N",
        help="leave out requests of the trace with more tokens (default: 0, none)")  # fmt: skip
    add("--seed", type=at_least(0), default=0, metavar="N",
        help="of lengths, texts and arrivals (default: 0)")  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rate", type=_several(_rate), default=(), metavar="R,...",
        help="requests/s of an open loop, a level for each; inf: all at once")  # fmt: skip
    add("--concurrency", type=_several(at_least(1)), default=(), metavar="N,...",
        help="requests at a time of a closed loop, a level for each (default: 8)")  # fmt: skip
    add("--trace-speed", type=_several(_rate), default=(1.0,), metavar="X,...",
        help="replay faster or slower, a level for each (default: 1)")  # fmt: skip
    add("--arrival", choices=ARRIVALS, default=ARRIVALS[0],
        help=f"of an open loop (default: {ARRIVALS[0]})")  # fmt: skip
    add("--burst-size", type=at_least(1), default=8, metavar="N",
        help="requests at once, with --arrival burst (default: 8)")  # fmt: skip
    add("--num-prompts", type=at_least(1), metavar="N",
        help=f"requests of a level (default: {DEFAULT_COUNT}, or what --duration or the trace "
        "gives)")  # fmt: skip
    add("--duration", type=seconds, default=0.0, metavar="SECONDS",
        help="send no longer than this, a level (default: 0, no limit)")  # fmt: skip
    add("--num-warmups", type=at_least(0), default=4, metavar="N",
        help="requests before each level that do not count (default: 4)")  # fmt: skip
    add("--max-in-flight", type=at_least(1), default=1024, metavar="N",
        help="of an open loop; beyond it requests are late (default: 1024)")  # fmt: skip
    add("--processes", type=at_least(1), default=1, metavar="N",
        help="that send and read (default: 1)")  # fmt: skip
    add("--slo", type=_slo, default={}, metavar="ttft=MS,...",
        help=f"limits for goodput, of {', '.join(SLO_PARTS)}")  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("json", "everything, the samples too; `compare` reads it"),
        ("csv", "a line a level"),
        ("html", "a report with plots"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what}")


def _run(args: argparse.Namespace) -> int:
    import asyncio

    from ekiden.bench.sweep import run
    from ekiden.bench.table import table

    config = _config(args)
    bar = Bar(unit=lambda total: f"{total} requests")
    so_far: list[Result] = []
    try:
        asyncio.run(run(config, bar, so_far.append))
    finally:
        bar.close()
        if so_far:
            print(table(so_far[-1]))
            _write(args, so_far[-1])
    return 0 if all(level.succeeded for level in so_far[-1].levels) else 1


def _write(args: argparse.Namespace, result: Result) -> None:
    from ekiden.bench import csv, html
    from ekiden.bench import result as results

    for path, write in (
        (args.json, results.write),
        (args.csv, csv.write),
        (args.html, html.write),
    ):
        if path is not None:
            write(path, result)
            print(f"written: {path}", file=sys.stderr)


def _config(args: argparse.Namespace) -> BenchConfig:
    from ekiden.bench.asking import Dialect
    from ekiden.bench.sweep import BenchConfig

    workload, name = _workload(args)
    return BenchConfig(
        url=args.base_url,
        model=args.model,
        api_key=args.api_key or env.api_key(),
        dialect=Dialect(endpoint=args.endpoint, ignore_eos=args.ignore_eos, extra=args.extra_body),
        tokenizer=args.tokenizer,
        workload=workload,
        workload_name=name,
        loads=_loads(args),
        arrival="trace" if args.trace else args.arrival,
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
    from ekiden.bench.workload import NAMED, Drawn, Shape

    if args.trace:
        traced = Traced(path=args.trace, max_len=args.max_model_len, seed=args.seed)
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
    )
    lengths = ", ".join(f"{shape.prompt}/{shape.output}" for shape in dict.fromkeys(shapes))
    shared = f", {args.shared_prefix_tokens} tokens shared" if args.shared_prefix_tokens else ""
    return drawn, f"{args.workload} ({lengths}{shared})"


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    from ekiden.bench.sweep import Load

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
    from ekiden.bench.result import Slo

    return Slo(**{f"{name}_ms": value for name, value in parts.items()})


def _several(parse: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    def values(text: str) -> tuple[float, ...]:
        return tuple(parse(part) for part in text.split(","))

    return values


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, as 0.5, 4 or inf")
    return value


def _slo(text: str) -> dict[str, float]:
    limits = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in SLO_PARTS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no part of an SLO: choose of {', '.join(SLO_PARTS)}, "
                "as ttft=500,tpot=50"
            )
        limits[name] = _rate(value)
    return limits


def _object(text: str) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a JSON object ({error}): try '{{\"top_p\": 0.9}}'"
        ) from None
