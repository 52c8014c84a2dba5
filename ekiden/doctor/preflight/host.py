"""This machine: cores, memory, /dev/shm, packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ekiden.doctor.preflight.check import Check, failure, ok, unseen, warning
from ekiden.doctor.rules.words import size

TABLE_BYTES = 1 << 20
"""Of /dev/shm, for the table by which ranks share cores. Their collectives and the KV that peers
map are anonymous files, which do not count against its size."""
NCCL_BYTES = 1 << 30
"""For the collectives of several cards, as its makers advise for containers, which have 64 MB."""
BUSY = 0.5
"""Processes that want a core, a core, before anything is started."""
PACKAGES = {
    "torch": "pip install 'ekiden[worker]'",
    "ucxx-cu12": "pip install 'ekiden[worker]' for the ucx wire; shm and tcp work without it",
    "grpcio": "pip install ekiden",
    "protobuf": "pip install ekiden",
    "redis": "pip install ekiden",
}
_OPTIONAL = ("ucxx-cu12",)


def cores(ranks: int, threads: int, usable: int, load: float) -> Check:
    """``threads``: of each rank; 0: shared out. ``load``: of the last minute."""
    wanted = ranks * max(threads, 1)
    seen = f"{usable} usable, load {load:.1f}, {ranks} rank{'s' * (ranks > 1)}"
    if wanted > usable:
        return warning(
            "cores", f"{seen} of {max(threads, 1)} threads want {wanted}",
            "a lower -tp, -pp or --threads-per-rank: ranks that wait for a core stop the others",
        )  # fmt: skip
    if load > BUSY * usable:
        return warning("cores", seen, "end what else runs here, or count on less than all of them")
    return ok("cores", seen)


def memory(need: int, room: int | None) -> Check:
    """``need``: of a replica at least, in bytes; ``room``: what can be taken, None: not told."""
    if room is None:
        return unseen("memory", "this system does not tell how much it has")
    seen = f"{size(need)} at least, of {size(room)} available"
    if need > room:
        return failure(
            "memory", seen, "a lower --kv-cache-memory or --max-num-batched-tokens, -q int8, or a "
            "smaller model",
        )  # fmt: skip
    return ok("memory", seen)


def shared_memory(device: str, ranks: int, path: Path = Path("/dev/shm")) -> Check:
    """Room in ``path`` for what the ranks keep there."""
    need = NCCL_BYTES if device == "cuda" and ranks > 1 else TABLE_BYTES
    if not path.is_dir() or not os.access(path, os.W_OK):
        return warning(
            str(path), "it cannot be written", "mount it; --core-sharing goes without until then"
        )
    free = shutil.disk_usage(path).free
    seen = f"{size(free)} free, {size(need)} wanted"
    if free < need:
        return warning(str(path), seen, "a larger one: `docker run --shm-size 1g`")
    return ok(str(path), seen)


def packages(find: Callable[[str], str] = version) -> list[Check]:
    """Versions of what a worker imports, read without importing it."""
    found, checks = [], []
    for package, remedy in PACKAGES.items():
        try:
            found.append(f"{package} {find(package)}")
        except PackageNotFoundError:
            lacks = warning if package in _OPTIONAL else failure
            checks.append(lacks("packages", f"{package} is not installed", remedy))
    return [ok("packages", ", ".join(found)), *checks] if found else checks
