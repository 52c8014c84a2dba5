"""The device draws what the reference draws, and picks the largest logit, lowest id first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.engine import draw as reference
from ekiden.layers.backends.triton import draw as on_device


@settings(max_examples=15, deadline=None)
@given(
    vocab=st.sampled_from([3, 256, 700]),
    seeds=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=3),
    position=st.integers(0, 1 << 20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_draw_is_the_references(
    device: str, vocab: int, seeds: list[int], position: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(position)
    logits = 4 * torch.randn(len(seeds), vocab, generator=generator)
    weights = torch.softmax(logits, -1).to(dtype)
    weights[:, 1::3] = 0  # filtered out
    expected = [
        reference.race(row.double().numpy(), seed, position)
        for row, seed in zip(weights, seeds, strict=True)
    ]
    keys = reference.Keys.of(seeds, [position] * len(seeds))
    drawn = reference.race_on_device(weights.to(device), keys)
    assert drawn.tolist() == expected


def test_many_draws_are_the_references(device: str) -> None:
    rows = 60
    weights = torch.softmax(torch.randn(600, generator=torch.Generator().manual_seed(1)), -1)
    expected = [reference.race(weights.double().numpy(), 1234, p) for p in range(rows)]
    keys = reference.Keys.of([1234] * rows, list(range(rows)))
    drawn = reference.race_on_device(weights.expand(rows, -1).to(device), keys)
    assert drawn.tolist() == expected
    assert len(set(expected)) > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 4096, 9000])
def test_greedy_takes_the_lowest_id_among_equals(
    device: str, vocab: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[1, vocab - 1] = logits[1, 2] = 30.0
    logits[2] = -7.0
    logits[3, : vocab - 1] = float("-inf")
    expected = [int(np.argmax(row.float().numpy())) for row in logits]
    assert expected[1:] == [2, 0, vocab - 1]
    assert on_device.greedy(logits.to(device)).tolist() == expected


def test_blocks_of_the_race_are_the_references() -> None:
    assert on_device.BLOCK == reference.BLOCK
