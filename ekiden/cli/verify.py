"""``ekiden verify``: prove on this machine that disaggregated output equals one process's."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiden.cli.command import DEFAULT_MODEL, MODEL_HELP, add_command
from ekiden.cli.kv_options import wires
from ekiden.cli.models import resolve
from ekiden.cli.options import ENGINE_OPTIONS, add_options, at_least, seconds
from ekiden.cli.serve import name_of
from ekiden.core.config import EngineConfig
from ekiden.core.env import quiet_grpc_forks

if TYPE_CHECKING:
    from ekiden.verify.layouts import Layout
    from ekiden.verify.main import VerifyConfig

QUANTISED = ("quantization", "kv_cache_dtype")
"""The engine's options that change numbers, and that split replicas must still agree on."""
TINY = "tiny"
THREAD_WIRES = ("memory", "shm", "tcp")
"""``ekiden.verify.house.WIRES``, which cannot be asked without torch."""

_EXAMPLES = """examples:
  ekiden verify                                   20 pairs of real processes, default model
  ekiden verify --grid full --model tiny          9,216 pairs in one process, 192 in real ones
  ekiden verify --grid full --sample 40           a part of both, on the default model
  ekiden verify --grid full --model tiny --replicas threads --sample 300 --seed 7
  ekiden verify --model DIR --prefill TP2 --prefill TP1/32 --decode TP1
  ekiden verify --prefill TP2:int8 --decode TP1:fp8 --json build/verify.json

A layout is TPn, PPn or TPnxPPn; /B after it sets the block size and :DTYPE that of the KV. The
full grid is TP 1-4, PP 1-2, blocks of 16, 32 and 48, KV of float32, bfloat16, int8 and fp8_e4m3,
every prefill against every decode. Exit code 0: each pair is equal, or refused with its reason;
1: one differs, hangs or fails, and the first layer, head and position that differ are named.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "verify", "prove that split output equals one process's", _EXAMPLES
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="MODEL",
        help=f"{MODEL_HELP}, or {TINY}: a small one of random weights (default: {DEFAULT_MODEL})",
    )  # fmt: skip
    _add_what(parser)
    _add_how_much(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", metavar="DTYPE",
        help="of weights, activations and KV (one of float32, bfloat16, float16; "
        "default: float32)",
    )  # fmt: skip
    for field in QUANTISED:
        add_options(parser, [o for o in ENGINE_OPTIONS if o.field == field], EngineConfig)
    parser.add_argument(
        "--kv-transport", default="auto", metavar="NAMES", type=wires,
        help="wires that may carry KV between processes, or auto (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the outcome of every pair to it"
    )
    parser.set_defaults(run=_run)


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grid", choices=("small", "full"), default="small",
        help="which pairs of layouts to compare (default: small)",
    )  # fmt: skip
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="LAYOUT",
            help=f"{role} layout instead of the grid's; may be repeated",
        )  # fmt: skip
    parser.add_argument(
        "--replicas", choices=("threads", "processes", "both"), metavar="KIND",
        help="threads: all pairs inside this process, over the memory wire; processes: real "
        "services; both (default: processes; with --grid full: both)",
    )  # fmt: skip

    parser.add_argument(
        "--thread-wire", choices=THREAD_WIRES, default=THREAD_WIRES[0], metavar="NAME",
        help=f"wire that carries KV with --replicas threads (one of {', '.join(THREAD_WIRES)}; "
        f"default: {THREAD_WIRES[0]})",
    )  # fmt: skip


def _add_how_much(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sample", type=at_least(0), default=0, metavar="N",
        help="only N of the pairs, drawn by --seed (default: 0, all of them)",
    )  # fmt: skip
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="(default: 0)")
    parser.add_argument(
        "--prompts", type=at_least(1), default=20, metavar="N",
        help="how many, with processes (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=at_least(1), default=32, metavar="N",
        help="tokens compared of each answer, at most, with processes (default: 32)",
    )  # fmt: skip
    parser.add_argument(
        "--cell-timeout", type=seconds, default=180.0, metavar="SECONDS",
        help="after which a pair counts as hanging (default: 180)",
    )  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    quiet_grpc_forks()
    from ekiden.verify.main import run

    with _model_dir(args.model) as directory:
        return run(_config(args, directory))


def _config(args: argparse.Namespace, model_dir: Path) -> VerifyConfig:
    from ekiden.verify.cover import Tile, cover
    from ekiden.verify.layouts import FULL, GRIDS, Grid
    from ekiden.verify.main import VerifyConfig

    base = GRIDS[args.grid]
    grid = Grid(
        prefill=_layouts(args.prefill) or base.prefill,
        decode=_layouts(args.decode) or base.decode,
    )
    whole = grid == GRIDS["full"]
    kind = args.replicas or ("both" if whole else "processes")
    return VerifyConfig(
        model_dir=model_dir,
        model_name=TINY if args.model == TINY else name_of(args.model, ""),
        grid=grid,
        tiles=tuple(cover(FULL)) if whole else (Tile(prefill=grid.prefill, decode=grid.decode),),
        threads=kind != "processes",
        thread_wire=args.thread_wire,
        processes=kind != "threads",
        sample=args.sample,
        seed=args.seed,
        prompts=args.prompts,
        tokens=args.max_tokens,
        dtype=args.dtype,
        **{field: getattr(args, field) for field in QUANTISED},
        transport=args.kv_transport,
        cell_timeout_s=args.cell_timeout,
        json=args.json,
    )


@contextmanager
def _model_dir(model: str) -> Iterator[Path]:
    if model != TINY:
        yield resolve(model)
        return
    from ekiden.verify.tiny import write_tiny_model

    with tempfile.TemporaryDirectory(prefix="ekiden-tiny-") as folder:
        yield write_tiny_model(Path(folder))


def _layouts(texts: list[str]) -> tuple[Layout, ...]:
    from ekiden.verify.layouts import Layout

    return tuple(Layout.parse(text) for text in texts)
