"""How much memory this host, or the container that we run in, can still give. Linux; no torch."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping: the host's, or less where a control group says so.

    Of every group that we are in, up to the topmost: its limit less what it uses, the file cache
    that the kernel can drop not counted. None where the system does not tell. ``root`` is where
    ``proc`` and ``sys`` are.
    """
    room = [_host_available(root), *(_group_room(*group) for group in _groups(root))]
    known = [bytes_left for bytes_left in room if bytes_left is not None]
    return min(known) if known else None


def _host_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """(directory, names of its files) of our group and of those around it.

    Inside a container the path may be one that only the host can see; then the mount shows our
    group as its top.
    """
    found: list[tuple[Path, tuple[str, str, str]]] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = ("sys/fs/cgroup/memory", _V1) if controllers else ("sys/fs/cgroup", _V2)
        inner = PurePosixPath(path.strip()).relative_to("/")
        for place in (inner, *inner.parents):
            found.append((root / top / place, names))
    return found


def _group_room(folder: Path, names: tuple[str, str, str]) -> int | None:
    limit_name, usage_name, cache_name = names
    limit, usage = _lines(folder / limit_name), _lines(folder / usage_name)
    if not limit or not usage or limit[0].strip() == "max":
        return None
    cache = [
        line.split()[1] for line in _lines(folder / "memory.stat") if line.split()[0] == cache_name
    ]
    return max(0, int(limit[0]) - int(usage[0]) + int(cache[0] if cache else 0))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []  # Not Linux, not this kind of control group, or none at all.
