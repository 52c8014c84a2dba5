"""Compile every Triton kernel for sm_80 and sm_90, without a GPU: part of `make check`.

The wrappers themselves are called, on CPU tensors, with a driver that only names the device; so
what is compiled is what they would launch. A kernel fails if it does not compile to a cubin, or if
it asks for more shared memory than the smallest of these devices has. Triton caches what it
compiled (~/.triton), so a second run takes seconds.

    python scripts/aot_triton.py [--arch 80 90 100] [--only WORD]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ekiden.cache.layout import SCALE_BYTES
from ekiden.layers.backends.triton import blocks, draw, embed, gated, kv, norm, quant, rope
from ekiden.layers.backends.triton.decode import decode_attention
from ekiden.layers.backends.triton.prefill import prefill_attention
from ekiden.layers.ops import AttentionKind

SHARED_BYTES = 99 << 10
"""Of one program: what sm_86 and sm_89 have (CUDA programming guide); sm_80 and 90 have more."""

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class NamedDevice:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="compile the Triton kernels ahead of time")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], metavar="SM")
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this in their name")
    args = parser.parse_args()
    began = time.monotonic()
    # Each kind of device in a process of its own: Triton knows one at a time.
    with ProcessPoolExecutor(len(args.arch), mp_context=get_context("spawn")) as pool:
        failures = sum(pool.map(compile_all, args.arch, [args.only] * len(args.arch)))
    verdict = f"{failures} failed" if failures else "all compile"
    print(f"aot: {verdict}, {time.monotonic() - began:.0f} s")
    return int(bool(failures))


def compile_all(arch: int, only: str) -> int:
    """Failures among the cases with ``only`` in their name."""
    compiled: list[Any] = []
    JITFunction.__getitem__ = lambda kernel, grid: (  # type: ignore[method-assign]
        lambda *a, **k: compiled.append(kernel.run(*a, grid=grid, warmup=True, **k))
    )
    triton.runtime.driver.set_active(NamedDevice(arch))  # type: ignore[arg-type]
    failures = 0
    for name, case in CASES.items():
        if only in name:
            compiled.clear()
            failures += compile_case(f"sm_{arch} {name}", case, compiled)
    return failures


def compile_case(name: str, case: Callable[[], None], compiled: list[Any]) -> int:
    """Failures of one case: 0 or 1, with a line that says what."""
    began = time.monotonic()
    try:
        case()
    except Exception as error:
        print(f"aot: {name}: does not compile: {error}", file=sys.stderr)
        return 1
    shared = max(kernel.metadata.shared for kernel in compiled)
    took = time.monotonic() - began
    print(f"aot: {name}: {took:.1f} s, {shared >> 10} KiB shared memory", flush=True)
    if shared <= SHARED_BYTES and all("cubin" in kernel.asm for kernel in compiled):
        return 0
    print(f"aot: {name}: more than {SHARED_BYTES >> 10} KiB, or no cubin", file=sys.stderr)
    return 1


def decode_case(
    dtype: torch.dtype,
    head_dim: int,
    cache: torch.dtype | None = None,
    *,
    softcap: float = 0.0,
    parts: int = 8,
) -> Callable[[], None]:
    def case() -> None:
        q, view, table, lengths, starts = paged(dtype, head_dim, cache)
        decode_attention(
            q, view, table, lengths, torch.empty_like(q), AttentionKind(0.1, soft_cap=softcap),
            query_starts=starts if parts > 1 else None, parts=parts,
        )  # fmt: skip

    return case


def prefill_case(
    dtype: torch.dtype, head_dim: int, cache: torch.dtype | None = None, *, softcap: float = 0.0
) -> Callable[[], None]:
    def case() -> None:
        q, view, table, lengths, starts = paged(dtype, head_dim, cache)
        prefill_attention(
            q, view, table, lengths, starts, torch.empty_like(q),
            AttentionKind(0.1, soft_cap=softcap),
            longest_query=512, skip_single=True,
        )  # fmt: skip

    return case


def paged(dtype: torch.dtype, head_dim: int, cache: torch.dtype | None) -> tuple[Tensor, ...]:
    """q, a layer of the cache, tables, lengths and query starts, of a model with 32 and 8 heads."""
    width = head_dim + SCALE_BYTES if cache else head_dim
    blocks_ = torch.empty(4, 8, 2, 2, 16, width, dtype=cache or dtype)
    q = torch.empty(4, 32, head_dim, dtype=dtype)
    table = torch.zeros(4, 8, dtype=torch.int32)
    starts = torch.arange(5, dtype=torch.int32)
    return q, kv.layer_view(blocks_, 1), table, torch.ones(4, dtype=torch.int32), starts


def rope_case(cache: torch.dtype | None, *, normed: bool) -> Callable[[], None]:
    def case() -> None:
        q, view, *_ = paged(BF16, 128, cache)
        angles, weight = torch.empty(4, 128), torch.empty(128)
        slots = torch.zeros(4, dtype=torch.int64)
        weights = {"q_weight_D": weight, "k_weight_D": weight, "eps": 1e-6} if normed else {}
        qkv = torch.empty(4, 48 * 128, dtype=BF16)
        rope.rotate_and_store(qkv, angles, angles, slots, view, q, **weights)  # type: ignore[arg-type]

    return case


def quant_case(rows: int, kind: int, groups: int) -> Callable[[], None]:
    def case() -> None:
        inputs, outputs = 2048, 2048
        weight = torch.empty(outputs, inputs // (2 if kind == quant.INT4 else 1)).byte()
        scales = torch.empty(outputs, groups, dtype=BF16)
        zeros = None if kind == quant.FP8 else torch.empty(outputs, groups).byte()
        quant.quant_linear(
            torch.empty(rows, inputs, dtype=BF16), weight, scales, zeros, None, kind=kind
        )

    return case


def elementwise() -> None:
    x, weight = torch.empty(4, 2048, dtype=BF16), torch.empty(2048)
    norm.rms_norm(x, weight, 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)
    for activation in gated.ACTIVATIONS:
        gated.gated(x, activation)
    embed.embed(torch.zeros(4, dtype=torch.int64), x, 0)


def copies() -> None:
    cache, ids = torch.empty(4, 8, 2, 2, 16, 128, dtype=BF16), torch.zeros(2, dtype=torch.int64)
    blocks.gather_blocks(cache, ids, cache[:2].clone())
    blocks.scatter_blocks(cache[:2].clone(), ids, cache)


def sampling() -> None:
    logits, numbers = torch.empty(4, 128256), torch.zeros(4, dtype=torch.int64)
    draw.greedy(logits)
    draw.draw(logits, numbers, numbers)


CASES: dict[str, Callable[[], None]] = {
    "decode attention bf16 d128": decode_case(BF16, 128),
    "decode attention bf16 d64, one part": decode_case(BF16, 64, parts=1),
    "decode attention bf16 d256, capped": decode_case(BF16, 256, softcap=50.0),
    "decode attention fp32 d128": decode_case(F32, 128),
    "decode attention int8 cache": decode_case(BF16, 128, torch.int8),
    "decode attention fp8 cache": decode_case(F16, 128, torch.float8_e4m3fn),
    "prefill attention bf16 d128": prefill_case(BF16, 128),
    "prefill attention bf16 d256, capped": prefill_case(BF16, 256, softcap=50.0),
    "prefill attention fp32 d128": prefill_case(F32, 128),
    "prefill attention fp8 cache": prefill_case(BF16, 128, torch.float8_e4m3fn),
    "rope and store bf16": rope_case(None, normed=False),
    "rope and store int8, normed": rope_case(torch.int8, normed=True),
    "rope and store fp8": rope_case(torch.float8_e4m3fn, normed=False),
    "int8 linear, 1 row": quant_case(1, quant.INT8, 16),
    "int4 linear, 1 row": quant_case(1, quant.INT4, 16),
    "int4 linear, 512 rows": quant_case(512, quant.INT4, 16),
    "fp8 linear, 512 rows": quant_case(512, quant.FP8, 1),
    "norms, gates, embedding": elementwise,
    "block copies": copies,
    "greedy and draw": sampling,
}


if __name__ == "__main__":
    sys.exit(main())
