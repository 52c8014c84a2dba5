"""Every kernel beside plain torch, in every dtype and kind of cache."""

from __future__ import annotations

import time

import torch
from ops_cases import LARGE, TINY, compare

from ekiden.engine.draw import Keys, race, race_on_device
from ekiden.layers.backends.triton import blocks, draw

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def run(device: str, quick: bool) -> int:
    """How many comparisons were out of bounds."""
    # The interpreter multiplies bfloat16 wrongly, so there it is left out.
    kinds: list[tuple[torch.dtype, torch.dtype | None]] = [(F32, None)]
    if device == "cuda":
        kinds += [(BF16, None), (F16, None)]
        if not quick:
            kinds += [(BF16, torch.int8), (BF16, torch.float8_e4m3fn)]
    wrong = sum(_ops(device, dtype, kv_dtype) for dtype, kv_dtype in kinds)
    return wrong + _draws(device) + _copies(device)


def _ops(device: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> int:
    began, wrong, count, worst = time.monotonic(), 0, 0, 0.0
    for name, difference in compare(device, dtype, LARGE if device == "cuda" else TINY, kv_dtype):
        count, worst = count + 1, max(worst, difference)
        if difference >= 1:
            wrong += 1
            print(f"WRONG {dtype} {kv_dtype or ''} {name}: {difference:.2f} of the bound")
    took = time.monotonic() - began
    print(
        f"{dtype}, cache {kv_dtype or dtype}: {count} comparisons, worst {worst:.2f} of the bound, "
        f"{took:.1f} s",
        flush=True,
    )
    return wrong


def _draws(device: str) -> int:
    rows, vocab = (64, 128256) if device == "cuda" else (3, 700)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3))
    weights = torch.softmax(logits, -1)
    keys = Keys.of([7] * rows, range(rows))
    drawn = race_on_device(weights.to(device), keys).tolist()
    expected = [race(row.double().numpy(), 7, p) for p, row in enumerate(weights)]
    wrong = sum(a != b for a, b in zip(drawn, expected, strict=True))
    wrong += draw.greedy(logits.to(device)).tolist() != logits.argmax(-1).tolist()
    print(f"draws: {rows} rows of {vocab}, {'right' if not wrong else f'{wrong} WRONG'}")
    return wrong


def _copies(device: str) -> int:
    cache = torch.randn(40, 4, 3, 2, 16, 64).to(device)
    ids, part = torch.randperm(40)[:9].to(device), cache[:, 1:3, 1:]
    staged = torch.empty(9, *part.shape[1:], device=device)
    blocks.gather_blocks(part, ids, staged)
    target = torch.zeros_like(cache)
    blocks.scatter_blocks(staged, ids, target[:, 1:3, 1:])
    right = torch.equal(staged, part[ids]) and torch.equal(target[ids][:, 1:3, 1:], staged)
    print(f"block copies: {'right' if right else 'WRONG'}")
    return int(not right)
