"""`python scripts/bench_kernels.py`: how fast the native linears are on this machine.

Every shape is multiplied by one copy of its weights after another, of which there are more than a
cache holds: in native lists, in `F.linear` and in oneDNN with prepacked weights, in turn. A figure
is the least time of many short runs, the median behind it in brackets; then the weights' bandwidth
(GB/s) and the arithmetic rate (GFLOP/s), one of which bounds it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.layers.backends.native.library import Op, Pool
from ekiden.layers.backends.native.packed import (
    linear_op,
    pack_dense,
    pack_quantised,
    quantised_linear_op,
)

SHAPES = {
    "smollm2 qkv": (960, 576),
    "smollm2 o": (576, 576),
    "smollm2 gate+up": (3072, 576),
    "smollm2 down": (576, 1536),
    "smollm2 head": (49152, 576),
    "tinyllama qkv": (2560, 2048),
    "tinyllama gate+up": (11264, 2048),
    "tinyllama down": (2048, 5632),
    "tinyllama head": (32000, 2048),
}
"""[outputs, inputs]"""
BEYOND_CACHE = 128 << 20
RUN = 4 << 20
"""Bytes of weights of one measured run: short, so that on a busy machine some are undisturbed."""
GROUP = 128

Run = Callable[[], int]
"""Multiplies by some copies; returns how many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    parser.add_argument("--kinds", nargs="+", default=["bf16"], choices=list(KINDS))
    parser.add_argument("--seconds", type=float, default=1.0, help="time a shape (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pool = Pool(args.threads)
    for kind in args.kinds:
        for name, (outputs, inputs) in SHAPES.items():
            if args.shapes in name:
                KINDS[kind](pool, f"{kind} {name}", outputs, inputs, args)


def dense(
    dtype: torch.dtype, pool: Pool, name: str, outputs: int, inputs: int, args: argparse.Namespace
) -> None:
    size = outputs * inputs * dtype.itemsize
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(_copies(size))]
    packed = [pack_dense(weight) for weight in weights]
    prepacked = [torch.ops.mkldnn._reorder_linear_weight(w) for w in weights]
    pointwise = torch.ops.mkldnn._linear_pointwise
    for rows in args.rows:
        x = torch.randn(rows, inputs).to(dtype)
        y = torch.empty(rows, outputs, dtype=dtype)
        runs = {
            "native": [_native(pool, [linear_op(w, x, y) for w in part]) for part in _runs(packed)],
            "F.linear": [_each(F.linear, x, part) for part in _runs(weights)],
            "prepacked": [
                _each(lambda x, w: pointwise(x, w, None, "none", [], ""), x, part)
                for part in _runs(prepacked)
            ],
        }
        report(name, rows, measure(runs, args.seconds), size, outputs, inputs)


def quantised(
    bits: int, pool: Pool, name: str, outputs: int, inputs: int, args: argparse.Namespace
) -> None:
    groups = -(-inputs // GROUP)
    q = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, groups)
    packed = [
        pack_quantised(q, scales, None, bits=bits, group_size=GROUP)
        for _ in range(_copies(outputs * inputs * bits // 8))
    ]
    size = packed[0].panels.numel()
    for rows in args.rows:
        x, y = torch.randn(rows, inputs).bfloat16(), torch.empty(rows, outputs).bfloat16()
        runs = {
            "native": [
                _native(pool, [quantised_linear_op(w, x, y) for w in part])
                for part in _runs(packed)
            ]
        }
        report(name, rows, measure(runs, args.seconds), size, outputs, inputs)


KINDS: dict[str, Callable[..., None]] = {
    "bf16": lambda *args: dense(torch.bfloat16, *args),
    "fp32": lambda *args: dense(torch.float32, *args),
    "int8": lambda *args: quantised(8, *args),
    "int4": lambda *args: quantised(4, *args),
}


def measure(runs: dict[str, list[Run]], seconds: float) -> dict[str, list[float]]:
    """Seconds of one matrix in each run, taken in turn until the time is up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, parts in runs.items():
            for run in parts:
                start = time.perf_counter()
                matrices = run()
                times[name].append((time.perf_counter() - start) / matrices)
    return times


def report(
    name: str,
    rows: int,
    times: dict[str, list[float]],
    size: int,
    outputs: int,
    inputs: int,
) -> None:
    cells = []
    for peer, seconds in times.items():
        least = min(seconds)
        middle = sorted(seconds)[len(seconds) // 2]
        cells.append(
            f"{peer} {least * 1e6:8.1f} us ({middle * 1e6:8.1f}) {size / least / 1e9:5.1f} GB/s "
            f"{2 * rows * outputs * inputs / least / 1e9:5.0f} GFLOP/s"
        )
    print(f"{name:24} M={rows:<4} " + " | ".join(cells), flush=True)


def _copies(size: int) -> int:
    return max(1, -(-BEYOND_CACHE // size))


def _runs(weights: list[Any]) -> Iterator[list[Any]]:
    """The copies by as many as a run takes."""
    each = max(1, len(weights) * RUN // BEYOND_CACHE)
    for start in range(0, len(weights), each):
        yield weights[start : start + each]


def _native(pool: Pool, ops: list[Op]) -> Run:
    listed = (Op * len(ops))(*ops)

    def run() -> int:
        pool.run(listed)
        return len(ops)

    return run


def _each(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> Run:
    def run() -> int:
        for weight in weights:
            multiply(x, weight)
        return len(weights)

    return run


if __name__ == "__main__":
    main()
