"""What every bench takes, and the cores that all of it shares."""

from __future__ import annotations

import argparse
import os
import signal
import sys

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


def pin(threads: int) -> None:
    """Keep this process, and all that it starts, on as many cores as there are threads; and let
    SIGTERM end it as Ctrl-C does, so that what it started is ended too."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        sys.exit(f"--threads {threads}: only {len(cores)} cores may be used here")
    os.sched_setaffinity(0, cores[:threads])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
