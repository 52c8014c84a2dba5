"""The engine's greedy tokens, Triton kernels and CUDA graphs against plain torch, in float32."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from bare_engine import BareEngine
from benchmarks.models import random_llama

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "initializer_range": 0.1,
}
TINY = {**SMALL, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1}
TIE = 1e-4
"""Two best log-probabilities that lie closer are no difference between kernels."""


def run(device: str, quick: bool) -> int:
    """1 where tokens differ that are no tie."""
    gpu = device == "cuda"
    count, tokens = (32, 32 if quick else 128) if gpu else (3, 3)
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 700 if gpu else 24, (count,), generator=generator).tolist()
    prompts = [torch.randint(3, 2048, (n,), generator=generator).tolist() for n in lengths]
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        path = random_llama(Path(folder) / "small", **(SMALL if gpu else TINY))
        for kernels in ("torch", "triton"):
            began = time.monotonic()
            with BareEngine(path, device, dtype="float32", kernels=kernels) as engine:
                answers[kernels] = engine.greedy(prompts, tokens)
            print(f"{kernels}: {count} requests, {time.monotonic() - began:.1f} s", flush=True)
    return _compare(answers["torch"], answers["triton"])


def _compare(expected: list[list[tuple[int, float]]], ours: list[list[tuple[int, float]]]) -> int:
    equal, ties, wrong = 0, 0, 0
    for theirs, mine in zip(expected, ours, strict=True):
        for (token, gap), (other, _) in zip(theirs, mine, strict=True):
            if token != other:
                # What follows a difference follows other text.
                ties, wrong = (ties + 1, wrong) if gap < TIE else (ties, wrong + 1)
                break
            equal += 1
    print(f"tokens: {equal} equal, {ties} requests that part at a tie, {wrong} that are WRONG")
    return wrong
