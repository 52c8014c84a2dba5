"""What the machine gives at best: bytes read a second, and bf16 multiplications a second.

Both are the best of several tries, since they stand for limits. Reading is measured by a loop of
vector loads over several streams, compiled with the machine's C compiler where there is one, and by
``torch.sum`` else; the way is told.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("read.c")
BUFFER_BYTES = 512 << 20
"""A thread's own; far more than any cache holds."""
TRIES = 8
GEMM_SHAPES = ((512, 2048, 2048), (512, 5632, 2048), (2048, 2048, 2048), (2048, 5632, 2048))
"""Tokens, outputs, inputs of a projection."""
TIMEOUT_S = 300.0


class Machine(NamedTuple):
    """Limits with so many threads."""

    bytes_per_s: float
    flops_per_s: float
    """Of a bf16 matrix product; a multiplication and an addition are two."""
    how: str
    """By what the reading was measured."""


def measure(threads: int) -> Machine:
    """Measure in a process of its own, so that no thread pool stays behind."""
    command = [sys.executable, str(Path(__file__)), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return Machine(**json.loads(done.stdout))


def best(machines: list[Machine]) -> Machine:
    """The limits of one machine that was measured several times."""
    return Machine(
        max(machine.bytes_per_s for machine in machines),
        max(machine.flops_per_s for machine in machines),
        machines[0].how,
    )


def read_rate(threads: int) -> tuple[float, str]:
    """Bytes a second, and how it was measured."""
    import torch

    buffers = [torch.ones(BUFFER_BYTES // 8, dtype=torch.int64) for _ in range(threads)]
    reads: list[Callable[[], object]]
    with tempfile.TemporaryDirectory() as folder:
        if (loop := _compiled(Path(folder))) is not None:
            reads = [partial(loop, buffer.data_ptr(), BUFFER_BYTES) for buffer in buffers]
            how = "a loop of vector loads"
        else:
            torch.set_num_threads(1)
            reads = [buffer.sum for buffer in buffers]
            how = "torch.sum (no C compiler here)"
        return threads * BUFFER_BYTES / _best_time(reads), how


def _compiled(folder: Path) -> Callable[[int, int], int] | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "read.so"
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    loop = ctypes.CDLL(str(library)).read_all
    loop.argtypes, loop.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64
    return loop


def _best_time(reads: Sequence[Callable[[], object]]) -> float:
    """Seconds for all of them at once, one thread each."""
    times = []
    with ThreadPoolExecutor(len(reads)) as pool:
        for _ in range(TRIES):
            began = time.perf_counter()
            for done in [pool.submit(read) for read in reads]:
                done.result()
            times.append(time.perf_counter() - began)
    return min(times)


def gemm_rate(threads: int) -> float:
    """Floating-point operations a second of the best of some projections."""
    import torch

    torch.set_num_threads(threads)
    rates = []
    for tokens, outputs, inputs in GEMM_SHAPES:
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, dtype=torch.bfloat16)
        for _ in range(TRIES):
            began = time.perf_counter()
            torch.nn.functional.linear(x, w)
            rates.append(2 * tokens * outputs * inputs / (time.perf_counter() - began))
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    rate, how = read_rate(threads)
    print(json.dumps(Machine(rate, gemm_rate(threads), how)._asdict()))


if __name__ == "__main__":
    main()
