"""``ekiden bench compare`` and ``ekiden bench mock``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ekiden.cli.command import add_command
from ekiden.cli.options import at_least, port_number, share

_COMPARE = """examples:
  ekiden bench compare before.json after.json
  ekiden bench compare before.json after.json --confidence 0.99 --json changes.json

Levels of equal name are compared, request by request of the samples: a figure has changed when the
confidence interval of the ratio B / A, by a bootstrap of blocks of neighbouring requests, leaves
out 1. Either may be a result of `ekiden sim --json`; if one is and the other is not, each must have
one level, whatever its name.

exit codes: 0 nothing became worse, 1 something did, or requests of B failed in a level where none
of A did, 2 the results cannot be compared
"""
_MOCK = """examples:
  ekiden bench mock --ttft 50 --itl 10
  ekiden bench mock --slots 4 --port 9000

Its first token comes after --ttft, each further one after --itl more. A token is a word. Ended by
Ctrl-C or SIGTERM it tells how late tokens left: what a client measures beyond that is the client's
own.
"""


def add_compare(verbs: Any) -> None:
    verb = add_command(verbs, "compare", "say what changed beyond noise", _COMPARE)
    verb.add_argument(
        "before", type=Path, metavar="A.json", help="a result of --json, of `ekiden sim` too"
    )
    verb.add_argument("after", type=Path, metavar="B.json", help="a later one")
    verb.add_argument(
        "--confidence", type=share, default=0.95, metavar="C",
        help="of the whole comparison, shared among its figures (default: 0.95)",
    )  # fmt: skip
    verb.add_argument("--json", type=Path, metavar="FILE", help="write the comparison to it")
    verb.set_defaults(run=_compare)


def add_mock(verbs: Any) -> None:
    verb = add_command(verbs, "mock", "serve at a known pace, to check clients with", _MOCK)
    add = verb.add_argument
    add("--ttft", type=at_least(0), default=50, metavar="MS", help="(default: 50)")
    add("--itl", type=at_least(0), default=10, metavar="MS", help="(default: 10)")
    add("--slots", type=at_least(0), default=0, metavar="N",
        help="requests answered at a time, others wait (default: 0, all)")  # fmt: skip
    add("--host", default="127.0.0.1", metavar="HOST", help="(default: 127.0.0.1)")
    add(
        "--port",
        type=port_number,
        default=8000,
        metavar="N",
        help="0: any free one (default: 8000)",
    )
    verb.set_defaults(run=_mock)


def _compare(args: argparse.Namespace) -> int:
    from ekiden.bench import result
    from ekiden.bench.compare import compare, lines, write

    found = compare(*map(result.read_either, (args.before, args.after)), confidence=args.confidence)
    print("\n".join(lines(found)))
    if args.json is not None:
        write(args.json, found)
    return 1 if found.worse else 0


def _mock(args: argparse.Namespace) -> int:
    import asyncio

    from ekiden.bench.mock import Lateness, MockConfig, serve

    config = MockConfig(
        ttft_s=args.ttft / 1000,
        itl_s=args.itl / 1000,
        slots=args.slots,
        host=args.host,
        port=args.port,
    )
    late = Lateness()
    asyncio.run(serve(config, late, lambda url: print(f"ready: {url}", flush=True)))
    print("\n".join(late.lines()))
    return 0
