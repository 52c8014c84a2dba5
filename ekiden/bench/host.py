"""What this host can do at best, without any model: the data sheet that a CPU has not."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ekiden.core.cores import usable_cores
from ekiden.planner.hardware import CPU_NAME, GIB, Gpu

READ_BYTES = 256 << 20
"""Of each core: more than caches hold."""
SIDE = 1024
"""Of the matrices that are multiplied."""
TRIES = 5


def this_host(cores: int = 0) -> Gpu:
    """A CPU as a device of the planner: rates of ``cores`` of them (0: all), measured now."""
    cores = cores or usable_cores()
    memory = _memory_gib()
    read = _reading_gbps(cores)
    return Gpu(
        name=f"{CPU_NAME}{cores}",
        memory_gib=memory,
        visible_gib=memory,
        bandwidth_gbps=read,
        bf16_tflops=_multiplying_tflops(),
        link_gbps=read / 2,  # what one process writes another has to read
        pcie_gbps=read / 2,
        tdp_w=0.0,
        source="measured on this host",
        gpus_per_host=max(1, usable_cores() // cores),
        nvlink_group=1,
    )


def _memory_gib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024 / GIB
    return 0.0


def _reading_gbps(cores: int) -> float:
    """Of all ``cores`` at once, each through memory of its own."""
    rows = [np.ones(READ_BYTES // 8) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as threads:
        return cores * READ_BYTES / _least(lambda: list(threads.map(np.sum, rows))) / 1e9


def _multiplying_tflops() -> float:
    """In float32, by the threads that numpy takes."""
    square = np.ones((SIDE, SIDE), dtype=np.float32)
    return 2 * SIDE**3 / _least(lambda: square @ square) / 1e12


def _least(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
