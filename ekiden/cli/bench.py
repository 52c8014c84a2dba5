"""``ekiden bench``: load an OpenAI-compatible endpoint and tell what its users would have felt."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiden.bench.arrivals import ARRIVALS
from ekiden.cli.bar import Bar
from ekiden.cli.bench_calibrate import add_calibrate
from ekiden.cli.bench_config import (
    DEFAULT_BURST,
    DEFAULT_COUNT,
    WORKLOADS,
    config_of,
)
from ekiden.cli.bench_verbs import add_compare, add_mock
from ekiden.cli.chat import DEFAULT_URL
from ekiden.cli.command import add_command
from ekiden.cli.options import at_least, seconds
from ekiden.cli.slo import SLO_HELP, slo_of
from ekiden.core.errors import SetupError

if TYPE_CHECKING:
    from ekiden.bench.result import Result

ENDPOINTS = ("completions", "chat")

_EXAMPLES = """examples:
  ekiden bench                                       8 at a time against a local gateway
  ekiden bench --rate 1,2,4 --slo ttft=500,tpot=50 --html report.html
  ekiden bench --concurrency 1,8,32 --workload long-short --json build/long.json
  ekiden bench --trace conversation_trace.jsonl --trace-speed 0.5,1 --duration 300
  ekiden bench compare before.json after.json

The workloads are prompts and answers of 256/128 (short-short), 256/1024 (short-long), 8192/128
(long-short) and 8192/1024 tokens (long-long); mixed draws from all four. docs/bench.md defines
every figure. EKIDEN_API_KEY is sent where --api-key is not given.

exit codes: 0 every request was answered, 1 some failed (what came is written all the same),
2 the run cannot be made
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
    add_calibrate(verbs)


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
    add("--repeat-prompts", action="store_true",
        help="ask what an earlier run asked, which a prefix cache may know")  # fmt: skip
    add("--seed", type=at_least(0), default=0, metavar="N",
        help="of lengths and arrivals (default: 0)")  # fmt: skip


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
    add("--burst-size", type=at_least(1), default=DEFAULT_BURST, metavar="N",
        help=f"requests at once, with --arrival burst (default: {DEFAULT_BURST})")  # fmt: skip
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
    add("--slo", type=slo_of(_rate), default={}, metavar="ttft=MS,...",
        help=SLO_HELP)  # fmt: skip


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

    config = config_of(args)
    bar = Bar(unit=lambda total: f"{total} requests")
    so_far: list[Result] = []
    try:
        asyncio.run(run(config, bar, so_far.append))
    finally:
        bar.close()
        if so_far:
            print(table(so_far[-1]))
            _write(args, so_far[-1])
    return 1 if any(x.errors or not x.succeeded for x in so_far[-1].levels) else 0


def _write(args: argparse.Namespace, result: Result) -> None:
    """Each file that was asked for, whatever becomes of the others.

    Raises:
        SetupError: some cannot be written; names them.
    """
    from ekiden.bench import csv, html
    from ekiden.bench import result as results

    lost = []
    for path, write in (
        (args.json, results.write),
        (args.csv, csv.write),
        (args.html, html.write),
    ):
        if path is not None:
            try:
                write(path, result)
            except OSError as error:
                lost.append(f"{path} cannot be written: {error.strerror}")
            else:
                print(f"written: {path}", file=sys.stderr)
    if lost:
        raise SetupError("; ".join(lost))


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


def _object(text: str) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a JSON object ({error}): try '{{\"top_p\": 0.9}}'"
        ) from None
