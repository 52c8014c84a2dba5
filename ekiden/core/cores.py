"""The cores of this machine that a process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores this process may run on, where the system tells; else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
