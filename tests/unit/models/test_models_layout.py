"""How layers are dealt to pipeline stages: once each, in order, the slowest stage the cheapest."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_shapes import llama_shape

from ekiden.core.config import EngineConfig
from ekiden.models.layout import kv_layout, layer_costs, layer_split
from ekiden.parallel.split import balanced_split, even_split

SMOLLM2 = llama_shape(
    num_layers=30,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
)


def sums(costs: list[int], split: list[tuple[int, int]]) -> list[int]:
    return [sum(costs[start:stop]) for start, stop in split]


def every_split(count: int, parts: int) -> list[list[tuple[int, int]]]:
    return [list(pairwise((0, *cuts, count))) for cuts in combinations(range(1, count), parts - 1)]


@given(
    costs=st.lists(st.integers(0, 50), min_size=1, max_size=9),
    parts=st.integers(1, 9),
)
def test_no_contiguous_split_has_a_cheaper_dearest_part_or_is_as_cheap_and_more_even(
    costs: list[int], parts: int
) -> None:
    parts = min(parts, len(costs))
    split = balanced_split(costs, parts)
    assert [i for start, stop in split for i in range(start, stop)] == list(range(len(costs)))
    assert len(split) == parts
    assert all(start < stop for start, stop in split)

    def worth(split: list[tuple[int, int]]) -> tuple[int, int]:
        return max(sums(costs, split)), sum(part**2 for part in sums(costs, split))

    assert worth(split) == min(map(worth, every_split(len(costs), parts)))


@pytest.mark.parametrize("parts", [0, 4])
def test_a_split_without_a_cost_for_each_part_is_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=f"3 costs cannot be split into {parts} parts"):
        balanced_split([1, 2, 3], parts)


@given(layers=st.integers(1, 40), parts=st.integers(1, 8))
def test_equal_costs_are_dealt_evenly_and_the_first_parts_take_one_more(
    layers: int, parts: int
) -> None:
    sizes = [stop - start for start, stop in balanced_split([7] * layers, min(parts, layers))]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_the_head_of_a_small_model_is_worth_eight_layers() -> None:
    costs = layer_costs(SMOLLM2)
    assert costs[-1] / costs[1] == pytest.approx(9.0, abs=0.01)
    assert costs[0] - costs[1] == 576
    assert layer_split(SMOLLM2, 1) == [(0, 30)]
    assert layer_split(SMOLLM2, 2) == [(0, 19), (19, 30)]
    assert layer_split(SMOLLM2, 3) == [(0, 12), (12, 25), (25, 30)]


@pytest.mark.parametrize("pp", [1, 2, 3, 7, 30])
def test_a_prefill_pool_deals_layers_evenly_and_the_stage_with_the_head_takes_no_odd_one(
    pp: int,
) -> None:
    """The head runs once a prompt there: with it counted for every token, one of two stages would
    have 19 of SmolLM2's 30 layers, and prefill would take 27% longer than with 15 each."""
    sizes = [last - first for first, last in layer_split(SMOLLM2, pp, prefill_only=True)]
    assert sorted(sizes) == sorted(last - first for first, last in even_split(30, pp))
    assert sizes[-1] == min(sizes)


def test_the_head_of_a_prefill_pool_is_counted_once_a_prompt() -> None:
    costs = layer_costs(SMOLLM2, tokens_per_logits=512)
    assert costs[-1] - costs[1] == 49152 * 576 // 512
    assert costs[:-1] == layer_costs(SMOLLM2)[:-1]


def test_a_head_dearer_than_all_layers_leaves_one_layer_on_the_last_stage() -> None:
    wide = msgspec.structs.replace(SMOLLM2, num_layers=4, vocab_size=10**6)
    assert layer_split(wide, 3) == [(0, 1), (1, 3), (3, 4)]


@pytest.mark.parametrize("prefill_only", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3, 7, 30])
def test_what_is_cached_where_follows_the_split(
    tmp_path: Path, pp: int, prefill_only: bool
) -> None:
    config = EngineConfig(
        model_dir=tmp_path,
        model_name="m",
        pipeline_parallel_size=pp,
        tensor_parallel_size=3,
        prefill_only=prefill_only,
    )
    ranks = kv_layout(SMOLLM2, config).ranks
    split = layer_split(SMOLLM2, pp, prefill_only=prefill_only)
    assert [(r.layer_start, r.layer_stop) for r in ranks] == [s for s in split for _ in range(3)]
