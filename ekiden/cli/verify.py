"""``ekiden verify``: prove on this machine that disaggregated output equals one process's."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ekiden.cli.command import DEFAULT_MODEL, MODEL_HELP, add_command
from ekiden.cli.models import resolve
from ekiden.cli.options import ENGINE_OPTIONS, add_options, at_least, seconds
from ekiden.cli.serve import name_of
from ekiden.core.config import EngineConfig
from ekiden.core.env import quiet_grpc_forks

if TYPE_CHECKING:
    from ekiden.verify.layouts import Layout

QUANTISED = ("quantization", "kv_cache_dtype")
"""The engine's options that change numbers, and that split replicas must still agree on."""

_EXAMPLES = """examples:
  ekiden verify --grid small
  ekiden verify --model DIR --prefill TP2 --prefill TP1/32 --decode TP1    your own pairs

A layout is TPn, PPn or TPnxPPn, and /B after it sets the block size. Exit code 0: every pair is
equal, or refused with its reason; 1: one differs or hangs.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "verify", "prove that split output equals one process's", _EXAMPLES
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--grid",
        choices=("small", "full"),
        default="small",
        help="which pairs of layouts to compare (default: small)",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="LAYOUT",
            help=f"{role} layout instead of the grid's; may be repeated",
        )  # fmt: skip
    parser.add_argument(
        "--prompts", type=at_least(1), default=20, metavar="N", help="how many (default: 20)"
    )
    parser.add_argument(
        "--max-tokens", type=at_least(1), default=32, metavar="N",
        help="tokens compared of each answer, at most (default: 32)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", metavar="DTYPE",
        help="of weights, activations and KV (one of float32, bfloat16, float16; "
        "default: float32)",
    )  # fmt: skip
    for field in QUANTISED:
        add_options(parser, [o for o in ENGINE_OPTIONS if o.field == field], EngineConfig)
    parser.add_argument(
        "--kv-transport",
        default="auto",
        metavar="NAMES",
        help="wires that may carry KV, or auto (default: auto)",
    )
    parser.add_argument(
        "--cell-timeout", type=seconds, default=180.0, metavar="SECONDS",
        help="after which a pair counts as hanging (default: 180)",
    )  # fmt: skip
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
            **{field: getattr(args, field) for field in QUANTISED},
            transport=args.kv_transport,
            cell_timeout_s=args.cell_timeout,
        )
    )


def _layouts(texts: list[str]) -> tuple[Layout, ...]:
    from ekiden.verify.layouts import Layout

    return tuple(Layout.parse(text) for text in texts)
