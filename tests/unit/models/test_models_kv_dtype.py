"""A model over a quantised KV cache stays near the exact one, at every length (faults row F15)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ekiden.core.errors import SetupError
from ekiden.layers.batch import Span
from tests.unit.models.tiny import (
    Replica,
    make_checkpoint,
    random_prompt,
    reference_logits,
    worst_error,
)

LENGTH = 300
BLOCKS = list(range(40, 20, -1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_length(replica: Replica, tokens: list[int]) -> Tensor:
    """Logits [length, V] of decode steps: every length is a step of its own."""
    steps = [replica.step([Span([token], at, BLOCKS, 1)]) for at, token in enumerate(tokens)]
    return torch.cat(steps)


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.1), ("fp8", 0.4), ("bfloat16", 0.04)])
def test_every_length_up_to_300_stays_near_the_exact_model(
    tmp_path: Path, dtype: str, bound: float
) -> None:
    """In parts of the logits' own spread, by decode steps and by one prefill."""
    reference = make_checkpoint(tmp_path, "llama3", initializer_range=0.1)
    tokens = random_prompt(LENGTH, seed=1)
    exact = reference_logits(reference, tokens)
    replica = Replica(tmp_path, kernels="torch", kv_cache_dtype=dtype)
    decoded = by_length(replica, tokens)
    whole = replica.step([Span(tokens, 0, BLOCKS, LENGTH)])
    for logits in (decoded, whole):
        error = (logits - exact).abs().amax(1) / exact.std(1)
        assert error.max() < bound
    # A number on the border between two bytes may fall either way.
    assert ((decoded - whole).abs().amax(1) / exact.std(1)).max() < bound / 10


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "qwen3"])
def test_windows_caps_and_norms_work_over_quantised_kv(
    tmp_path: Path, family: str, dtype: str
) -> None:
    """As without, but for the rounding: the split model equals the whole one."""
    reference = make_checkpoint(tmp_path, family, initializer_range=0.1)
    spread = float(reference_logits(reference, random_prompt(37, seed=0)).std())
    alone = Replica(tmp_path, kernels="torch", kv_cache_dtype=dtype)
    split = Replica(tmp_path, tp=2, pp=2, kernels="torch", kv_cache_dtype=dtype)
    errors = [worst_error(replica, reference) / spread for replica in (alone, split)]
    assert max(errors) < (0.1 if dtype == "int8" else 0.4)
    assert errors[0] == pytest.approx(errors[1], abs=0.01)


def test_heads_that_leave_a_scale_out_of_place_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=6)
    with pytest.raises(SetupError, match=r"--kv-cache-dtype int8 .* multiple of 4 .* have 6"):
        Replica(tmp_path, kv_cache_dtype="int8")


def test_floats_of_another_kind_are_refused_where_kernels_do_not_know_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3")
    with pytest.raises(SetupError, match=r"bfloat16 beside activations of float32.*choose auto"):
        Replica(tmp_path, kv_cache_dtype="bfloat16")
