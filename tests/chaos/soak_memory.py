"""The memory of a deployment's processes while it is under load, and whether it grows.

Flat means: over the last ``JUDGED`` of the run, the line through a process's samples (least
squares) rises by less than ``GROWTH`` of its mean and ``GROWTH_BYTES``, whichever is more. The
first part of a run is not judged: pools, caches and allocators fill up to the sizes they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

JUDGED, GROWTH, GROWTH_BYTES = 0.6, 0.02, 4 << 20


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One process at one moment. Bytes; ``shared`` is what it maps together with others,
    ``pinned`` what is locked or registered with a device."""

    requests: int
    resident: int
    shared: int
    pinned: int
    descriptors: int
    threads: int


def look(pid: int, requests: int) -> Sample:
    """A process after so many requests."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return Sample(
        requests=requests,
        resident=_bytes(fields["VmRSS"]),
        shared=_bytes(fields["RssShmem"]),
        pinned=_bytes(fields["VmLck"]) + _bytes(fields["VmPin"]),
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=int(fields["Threads"]),
    )


def _bytes(kib: str) -> int:
    return int(kib.split()[0]) << 10


def growth(samples: Sequence[Sample], field: str) -> float:
    """By how much the fitted line rises over the judged part of the run."""
    last = samples[-1].requests
    judged = [s for s in samples if s.requests >= (1 - JUDGED) * last]
    xs = [s.requests for s in judged]
    ys = [float(getattr(s, field)) for s in judged]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / (spread or 1)
    return slope * (xs[-1] - xs[0])


def not_flat(name: str, samples: Sequence[Sample]) -> list[str]:
    """A sentence for each thing of a process that grows."""
    said = []
    for field in ("resident", "shared", "pinned"):
        mean = sum(getattr(s, field) for s in samples) / len(samples)
        rise = growth(samples, field)
        if rise > max(GROWTH * mean, GROWTH_BYTES):
            said.append(f"{name}: {field} memory rises by {rise / 2**20:.1f} MiB")
    for field in ("descriptors", "threads"):
        if (rise := growth(samples, field)) > 2:
            said.append(f"{name}: {rise:.0f} {field} more")
    return said
