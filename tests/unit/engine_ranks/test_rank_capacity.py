"""The number of KV blocks: what memory buys, and a refusal that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.engine.capacity import resolve_num_blocks, resolve_threads
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout

BLOCK_BYTES = 16 * 3 * 2 * 2 * 4 * 4
"""16 tokens, 3 layers, 2 KV heads, K and V, 4 elements of 4 bytes."""


Blocks = Callable[..., int]


@pytest.fixture
def blocks(small_model: ModelConfig) -> Blocks:
    def resolve(**fields: Any) -> int:
        config = EngineConfig(model_dir=Path("/m"), model_name="m", **fields)
        return resolve_num_blocks(small_model, config, kv_layout(small_model, config))

    return resolve


def test_memory_is_the_whole_replicas_however_it_is_split(blocks: Blocks) -> None:
    for split in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}):
        assert blocks(kv_cache_memory_bytes=BLOCK_BYTES * 10 + 5, **split) == 10


def test_the_override_wins(blocks: Blocks) -> None:
    assert blocks(num_gpu_blocks_override=77, kv_cache_memory_bytes=1) == 77


def test_one_longest_sequence_must_fit(blocks: Blocks) -> None:
    assert blocks(kv_cache_memory_bytes=2 * BLOCK_BYTES) == 2
    needed = f"raise it to at least {2 * BLOCK_BYTES}"
    with pytest.raises(SetupError, match=rf"holds 16 tokens.*have 32.*at most 16, or {needed}"):
        blocks(kv_cache_memory_bytes=2 * BLOCK_BYTES - 1)
    with pytest.raises(SetupError, match=r"override 1 holds 16 .*at least 2"):
        blocks(num_gpu_blocks_override=1)
    assert blocks(num_gpu_blocks_override=1, max_model_len=16) == 1


def test_nothing_that_fits_is_not_advised_to_be_shorter(blocks: Blocks) -> None:
    with pytest.raises(SetupError) as caught:
        blocks(kv_cache_memory_bytes=10)
    assert "--max-model-len" not in caught.value.message


def test_cores_are_shared_and_nobody_gets_less_than_one() -> None:
    config = EngineConfig(model_dir=Path("/m"), model_name="m")
    assert resolve_threads(config, 100000) == 1
    assert resolve_threads(config, 1) >= resolve_threads(config, 2) >= 1
    assert resolve_threads(msgspec.structs.replace(config, threads_per_rank=3), 100) == 3
