"""`python scripts/bench_kernels.py`: how fast the native linears are on this machine.

Every shape is multiplied by as many copies of its weights as no cache holds, in one native list, in
`F.linear` and in oneDNN with prepacked weights, in turn. A figure is the least time of many; beside
it stands the weights' bandwidth (GB/s) or the arithmetic rate (GFLOP/s), whichever bounds it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

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
GROUP = 128


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
    for rows in args.rows:
        x = torch.randn(rows, inputs).to(dtype)
        y = torch.empty(rows, outputs, dtype=dtype)
        ops = (Op * len(weights))(*(linear_op(w, x, y) for w in packed))
        runs: dict[str, Callable[[], object]] = {
            "native": lambda ops=ops: pool.run(ops),
            "F.linear": lambda x=x: [F.linear(x, w) for w in weights],
        }
        if torch.backends.mkldnn.is_available():
            runs["prepacked"] = _prepacked(x, weights)
        report(name, rows, measure(runs, args.seconds), len(weights), size, outputs, inputs)


def quantised(
    bits: int, pool: Pool, name: str, outputs: int, inputs: int, args: argparse.Namespace
) -> None:
    size = outputs * inputs * bits // 8 + 3 * outputs * -(-inputs // GROUP)
    groups = -(-inputs // GROUP)
    packed = [
        pack_quantised(
            torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8),
            torch.rand(outputs, groups),
            torch.randint(0, 2**bits, (outputs, groups), dtype=torch.uint8),
            bits=bits,
            group_size=GROUP,
        )
        for _ in range(_copies(size))
    ]
    for rows in args.rows:
        x, y = torch.randn(rows, inputs).bfloat16(), torch.empty(rows, outputs).bfloat16()
        ops = (Op * len(packed))(*(quantised_linear_op(w, x, y) for w in packed))
        times = measure({"native": lambda ops=ops: pool.run(ops)}, args.seconds)
        report(name, rows, times, len(packed), size, outputs, inputs)


KINDS: dict[str, Callable[..., None]] = {
    "bf16": lambda *args: dense(torch.bfloat16, *args),
    "fp32": lambda *args: dense(torch.float32, *args),
    "int8": lambda *args: quantised(8, *args),
    "int4": lambda *args: quantised(4, *args),
}


def measure(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn until the time is up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or len(times["native"]) < 3:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def report(
    name: str,
    rows: int,
    times: dict[str, list[float]],
    copies: int,
    size: int,
    outputs: int,
    inputs: int,
) -> None:
    cells = []
    for peer, seconds in times.items():
        least = min(seconds) / copies
        middle = sorted(seconds)[len(seconds) // 2] / copies
        cells.append(
            f"{peer} {least * 1e6:8.1f} us ({middle * 1e6:8.1f}) {size / least / 1e9:5.1f} GB/s "
            f"{2 * rows * outputs * inputs / least / 1e9:5.0f} GFLOP/s"
        )
    print(f"{name:24} M={rows:<4} " + " | ".join(cells), flush=True)


def _copies(size: int) -> int:
    return max(1, -(-BEYOND_CACHE // size))


def _prepacked(x: Tensor, weights: list[Tensor]) -> Callable[[], object]:
    multiply = torch.ops.mkldnn._linear_pointwise
    packed = [torch.ops.mkldnn._reorder_linear_weight(w) for w in weights]
    return lambda: [multiply(x, w, None, "none", [], "") for w in packed]


if __name__ == "__main__":
    main()
