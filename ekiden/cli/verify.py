"""``ekiden verify``: prove on this machine that disaggregated output equals one process's."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ekiden.cli.models import resolve
from ekiden.cli.options import at_least, seconds
from ekiden.cli.serve import name_of
from ekiden.core.env import quiet_grpc_forks

if TYPE_CHECKING:
    from ekiden.verify.layouts import Layout

DEFAULT_MODEL = "smollm2-135m-instruct"

_EXAMPLES = """examples:
  ekiden verify --grid small
  ekiden verify --model DIR --prefill TP2 --prefill TP1/32 --decode TP1    your own pairs

A layout is TPn, PPn or TPnxPPn, and /B after it sets the block size. Exit code 0: every pair is
equal, or refused with its reason; 1: one differs or hangs.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="prove that split output equals one process's",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="MODEL")
    parser.add_argument("--grid", choices=("small", "full"), default="small")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="LAYOUT",
            help=f"{role} layout instead of the grid's; may be repeated",
        )  # fmt: skip
    parser.add_argument("--prompts", type=at_least(1), default=20, metavar="N")
    parser.add_argument("--max-tokens", type=at_least(1), default=32, metavar="N")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", metavar="DTYPE"
    )
    parser.add_argument("--transport", default="ucx", metavar="NAME")
    parser.add_argument("--cell-timeout", type=seconds, default=180.0, metavar="SECONDS")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    quiet_grpc_forks()
    from ekiden.verify.layouts import GRIDS, Grid
    from ekiden.verify.main import VerifyConfig, run

    base = GRIDS[args.grid]
    grid = Grid(
        prefill=_layouts(args.prefill) or base.prefill,
        decode=_layouts(args.decode) or base.decode,
    )
    return run(
        VerifyConfig(
            model_dir=resolve(args.model),
            model_name=name_of(args.model, ""),
            grid=grid,
            prompts=args.prompts,
            tokens=args.max_tokens,
            dtype=args.dtype,
            transport=args.transport,
            cell_timeout_s=args.cell_timeout,
        )
    )


def _layouts(texts: list[str]) -> tuple[Layout, ...]:
    from ekiden.verify.layouts import Layout

    return tuple(Layout.parse(text) for text in texts)
