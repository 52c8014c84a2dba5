"""Prefill and decode of a random 1.1B Llama in bf16: beside plain torch, and beside the card.

A row's floor is the time that the card needs at least: the bytes over its bandwidth, or the
operations over its rate, whichever is more; both are measured here, and the data sheet's figures
are printed beside them where the card is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from bare_engine import BareEngine
from benchmarks.machine import Machine
from benchmarks.models import CACHE, RANDOM_1B, Shape, random_llama
from benchmarks.results import Row, publish, row
from benchmarks.work import Decode, Prefill, Work

SHEETS = {
    "B200": (8000e9, 2250e12),
    "GH200": (4000e9, 989e12),
    "H200": (4800e9, 989e12),
    "H100 PCIe": (2000e9, 756e12),
    "H100 NVL": (3900e9, 835e12),
    "H100": (3350e9, 989e12),
    "A100-SXM4-80GB": (2039e9, 312e12),
    "A100-SXM4-40GB": (1555e9, 312e12),
    "A100": (1935e9, 312e12),
    "L40S": (864e9, 362e12),
    "L40": (864e9, 181e12),
    "L4": (300e9, 121e12),
    "A10": (600e9, 125e12),
    "RTX 4090": (1008e9, 165e12),
}
"""Bytes a second and dense bf16 operations a second, from the makers' data sheets. A longer name
comes before the one that is its beginning."""
CONTEXT = 512
TINY = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1, "vocab_size": 400}


class Kind(NamedTuple):
    """One way to run the model."""

    name: str
    kernels: str


def run(device: str, quick: bool) -> int:
    """Prints and writes build/bench/gpu.json; never wrong."""
    gpu = device == "cuda"
    path = random_llama(CACHE / RANDOM_1B) if gpu else random_llama(CACHE / "tiny", **TINY)
    machine = _measure(device)
    prompts = (512, 2048) if gpu else (20,)
    batches = ((1, 32) if quick else (1, 8, 32, 128)) if gpu else (1, 2)
    works: list[Work] = [Prefill(prompt) for prompt in prompts]
    works += [Decode(batch, CONTEXT if gpu else 20) for batch in batches]
    rates = {
        kernels: [_rate(path, device, kernels, work) for work in works]
        for kernels in ("triton", "torch")
    }
    rows = []
    for i, work in enumerate(works):
        rows += _rows(work, rates["triton"][i], rates["torch"][i], path, machine)
    publish("gpu" if gpu else "gpu-script", rows)
    return 0


def _rows(work: Work, ours: float, plain: float, path: Path, machine: Machine) -> list[Row]:
    name = f"{path.name}, {work}"
    ceiling = Shape.of(path).ceiling(work, machine)
    return [
        row(name, ours, "tokens/s", peer=plain, peer_name="plain torch"),
        row(name, ours, "tokens/s", peer=ceiling, peer_name="roofline, measured"),
    ]


def _rate(path: Path, device: str, kernels: str, work: Work) -> float:
    """Tokens a second through the engine: whole steps, driver and sampling included."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    with BareEngine(
        path, device, dtype=dtype, kernels=kernels, max_num_batched_tokens=2048, max_num_seqs=128
    ) as engine:
        measure = _prefill_rate if isinstance(work, Prefill) else _decode_rate
        measure(engine, work, device)  # compiles, records, and sizes the allocator
        rate = measure(engine, work, device)
    print(f"{kernels}: {work}: {rate:,.0f} tokens/s", flush=True)
    return rate


def _prefill_rate(engine: BareEngine, work: Prefill, device: str) -> float:
    return work.prompt / min(_seconds(lambda: _drain(engine, [work.prompt], 1)) for _ in range(5))


def _decode_rate(engine: BareEngine, work: Decode, device: str) -> float:
    tokens = 64 if device == "cuda" else 3
    engine.start(_prompts([work.context] * work.batch), tokens, None)
    known: dict[int, int] = {}
    while len(known) < work.batch:  # until every prompt is computed
        known |= engine.step()
    steps = []
    while engine.has_work:
        began = time.perf_counter()
        given = sum(engine.step().values())
        if given == work.batch:
            steps.append(time.perf_counter() - began)
    return work.batch / sorted(steps)[len(steps) // 2]


def _drain(engine: BareEngine, lengths: list[int], tokens: int) -> None:
    engine.start(_prompts(lengths), tokens, None)
    while engine.has_work:
        engine.step()


def _prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(3, 400, (n,), generator=generator).tolist() for n in lengths]


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _measure(device: str) -> Machine:
    """The card's read bandwidth and bf16 product rate, as they are."""
    gpu = device == "cuda"
    size = (4 << 30 if gpu else 16 << 20, 8192 if gpu else 128)
    data = torch.ones(size[0] // 4, device=device)
    a = torch.randn(size[1], size[1], device=device).bfloat16()
    sync = torch.cuda.synchronize if gpu else lambda: None

    def timed(call: Callable[[], object]) -> float:
        return min(_seconds(lambda: (call(), sync())) for _ in range(8))

    machine = Machine(data.nbytes / timed(data.sum), 2 * size[1] ** 3 / timed(lambda: a @ a), "sum")
    name = torch.cuda.get_device_name() if gpu else "the CPU, for the script's sake"
    print(
        f"{name}: {machine.bytes_per_s / 1e9:,.0f} GB/s, {machine.flops_per_s / 1e12:,.1f} TFLOP/s"
    )
    sheet = next((figures for card, figures in SHEETS.items() if card in name), None)
    if sheet:
        print(f"data sheet: {sheet[0] / 1e9:,.0f} GB/s, {sheet[1] / 1e12:,.0f} TFLOP/s")
    return machine
