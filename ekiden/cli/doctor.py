"""``ekiden doctor``: what ails a deployment, why, and what mends it; ``--preflight``: what will."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ekiden.cli.bar import Bar
from ekiden.cli.chat import DEFAULT_URL
from ekiden.cli.command import MODEL_HELP, SERVED_NAME_HELP, add_command
from ekiden.cli.options import (
    ENGINE_OPTIONS,
    add_options,
    add_redis,
    add_switches,
    port_number,
    redis_url,
    seconds,
)
from ekiden.cli.output import as_json
from ekiden.cli.plan_options import duration
from ekiden.core import env
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError

if TYPE_CHECKING:
    from ekiden.doctor.evidence import Evidence, SamePrompts, Situation

WATCH_S = 10.0

_EXAMPLES = """examples:
  ekiden doctor                                      watch the gateway of this machine
  ekiden doctor --redis redis://10.0.0.5:6379/0 --url http://gateway:8000 --watch 30
  ekiden doctor --ttft-p95 500ms --tpot-p95 50ms     hold it against objectives
  ekiden doctor --bench tp1.json --bench tp2.json    judge what was measured, watch nothing
  ekiden doctor --reference-url http://other:8000    are a quantised model's answers still right?
  ekiden doctor --preflight smollm2-135m-instruct --redis redis://10.0.0.5:6379/0 -tp 2

Watch while requests are served: what nobody asks for cannot be slow. Exit codes: 0 nothing was
found, 1 something was, 2 there is nothing to look at. docs/doctor.md has every symptom.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "doctor", "find what ails a deployment, and its remedy", _EXAMPLES
    )
    add_redis(parser)
    parser.add_argument(
        "--url", default="",
        help=f"of the gateway (default: {DEFAULT_URL}, unless only --bench or --reference-url is "
        "given)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print plain data, not a page")
    serving = parser.add_argument_group("while it serves")
    serving.add_argument(
        "--watch", type=seconds, default=WATCH_S, metavar="SECONDS",
        help=f"how long to look (default: {WATCH_S:g})",
    )  # fmt: skip
    serving.add_argument(
        "--bench", type=Path, action="append", default=[], metavar="FILE",
        help="a result of `ekiden bench --json`, or of `ekiden sim --json`; may be repeated, and "
        "results of a bench are compared",
    )  # fmt: skip
    for what in ("ttft", "tpot"):
        serving.add_argument(
            f"--{what}-p95", type=duration, default=0.0, metavar="TIME",
            help=f"an objective: {what.upper()} that 95 of 100 answers keep, as 500ms",
        )  # fmt: skip
    serving.add_argument(
        "--reference-url", default="", metavar="URL",
        help="of a gateway with the same model, not quantised: both are asked the same prompts",
    )  # fmt: skip
    _add_preflight(parser)
    parser.set_defaults(run=_run)


def _add_preflight(parser: argparse.ArgumentParser) -> None:
    before = parser.add_argument_group("before it serves")
    before.add_argument(
        "--preflight", action="store_true",
        help="check this machine, Redis and the replicas there for one more replica",
    )  # fmt: skip
    before.add_argument("model", nargs="?", default="", metavar="MODEL", help=MODEL_HELP)
    before.add_argument(
        "--served-model-name", default="", metavar="NAME", help=SERVED_NAME_HELP
    )  # fmt: skip
    before.add_argument(
        "--host", default="127.0.0.1", metavar="HOST",
        help="address the replica will listen on (default: 127.0.0.1)",
    )  # fmt: skip
    before.add_argument(
        "--port", type=port_number, default=0, metavar="N",
        help="port it will listen on; 0: a free one (default: 0)",
    )  # fmt: skip
    before.add_argument("--advertise", default="", metavar="HOST:PORT", help="what peers will dial")
    engine = parser.add_argument_group("the replica of --preflight, as `ekiden serve` takes it")
    add_options(engine, ENGINE_OPTIONS, EngineConfig)
    add_switches(engine)


def _run(args: argparse.Namespace) -> int:
    if args.preflight:
        from ekiden.cli.doctor_preflight import run

        return run(args)
    if args.model:
        raise SetupError(f"MODEL {args.model} is for --preflight: add it, or leave MODEL out")
    return _diagnose(args)


def _diagnose(args: argparse.Namespace) -> int:
    from ekiden.cli.doctor_page import page
    from ekiden.doctor.symptoms import diagnose

    found = diagnose(_evidence(args))
    print(as_json(found) if args.json else page(found))
    return 1 if found.findings or found.evidence.failing else 0


def _evidence(args: argparse.Namespace) -> Evidence:
    from ekiden.doctor.evidence import Evidence, Objectives

    benches = _benches(args.bench)
    same = _same_prompts(args)
    watches = bool(redis_url(args) if not args.bench else args.redis) or args.url
    only_files = args.bench or args.reference_url
    watched = _watched(args) if watches or not only_files else Evidence()
    return msgspec.structs.replace(
        watched,
        situations=(*watched.situations, *benches),
        objectives=Objectives(ttft_s=args.ttft_p95, tpot_s=args.tpot_p95),
        same_prompts=same,
    )


def _watched(args: argparse.Namespace) -> Evidence:
    from ekiden.doctor.watch import Watch

    bar = Bar(unit=lambda total: f"{total} s")
    url = (args.url or DEFAULT_URL).rstrip("/")
    total = max(1, round(args.watch))
    try:
        return asyncio.run(
            Watch(redis_url(args), url).run(
                args.watch, lambda passed: bar("watching", min(int(passed), total), total)
            )
        )
    finally:
        bar.close()


def _benches(files: list[Path]) -> list[Situation]:
    """Raises SetupError: a file is no result of a bench or of a simulation."""
    from ekiden.doctor.results import read

    return [situation for file in files for situation in read(file)]


def _same_prompts(args: argparse.Namespace) -> SamePrompts | None:
    if not args.reference_url:
        return None
    from ekiden.doctor.same_prompts import compare

    ours, other = (url.rstrip("/") for url in (args.url or DEFAULT_URL, args.reference_url))
    if ours == other:
        raise SetupError(f"--reference-url {other} is the gateway itself: name another")
    return asyncio.run(compare(ours, other, env.api_key()))
