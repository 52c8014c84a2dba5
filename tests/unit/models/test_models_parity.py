"""Every family and every split computes what transformers computes, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ekiden.layers.batch import ForwardBatch, Span
from tests.unit.models.tiny import (
    FAMILIES,
    VOCAB,
    Replica,
    make_checkpoint,
    random_prompt,
    reference_logits,
    worst_error,
)
from tests.unit.native.native_rig import needs_native

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[1, 2, 8])
def by_kv_heads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("kv")
    return path, make_checkpoint(path, "llama3", num_key_value_heads=request.param)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_any_kv_heads_over_any_tp(by_kv_heads: tuple[Path, PreTrainedModel], tp: int) -> None:
    path, reference = by_kv_heads
    assert worst_error(Replica(path, tp=tp), reference) < TOLERANCE


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_equals_transformers_alone_and_split(tmp_path: Path, family: str) -> None:
    reference = make_checkpoint(tmp_path, family)
    assert worst_error(Replica(tmp_path), reference) < TOLERANCE
    assert worst_error(Replica(tmp_path, tp=2, pp=2), reference) < TOLERANCE


@needs_native
@pytest.mark.parametrize("family", ["gemma2", "llama3", "olmo2"])
def test_decode_steps_of_every_kind_of_layer_are_recorded(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    replica = Replica(tmp_path, kernels="native")
    replica.step([Span([1, 2, 3], 0, [0], 1)])
    steps = replica.ranks[0]._steps  # type: ignore[attr-defined]
    assert not steps._recorded
    replica.step([Span([4], 3, [0], 1)])
    assert steps._recorded


def test_a_width_norm_counts_replicated_kv_heads_once(tmp_path: Path) -> None:
    """OLMo 2 norms k over all heads; two of four ranks hold each of the two."""
    reference = make_checkpoint(tmp_path, "olmo2", num_key_value_heads=2)
    for tp in (3, 4):
        assert worst_error(Replica(tmp_path, tp=tp), reference) < TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [2, 3])
def test_tied_and_untied_heads_over_stages(tmp_path: Path, tied: bool, pp: int) -> None:
    """F80: the last stage of a tied model has a head although it has no embedding."""
    reference = make_checkpoint(tmp_path, "llama3", tie_word_embeddings=tied, num_hidden_layers=4)
    assert worst_error(Replica(tmp_path, pp=pp), reference) < TOLERANCE


def test_stages_balanced_for_prefill_compute_the_same(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama3", vocab_size=2000, num_hidden_layers=4)
    either, prefill = Replica(tmp_path, pp=2), Replica(tmp_path, pp=2, prefill_only=True)
    assert [len(rank.layers) for rank in either.ranks] == [3, 1]  # type: ignore[attr-defined]
    assert [len(rank.layers) for rank in prefill.ranks] == [2, 2]  # type: ignore[attr-defined]
    assert worst_error(prefill, reference) < TOLERANCE


def test_heads_that_do_not_divide_over_four_ranks(tmp_path: Path) -> None:
    """F141: 14 query heads in 7 groups over 4 ranks."""
    sizes = {"num_attention_heads": 14, "num_key_value_heads": 7, "hidden_size": 56}
    reference = make_checkpoint(tmp_path, "qwen2", **sizes)
    assert worst_error(Replica(tmp_path, tp=4), reference) < TOLERANCE


def test_a_block_size_of_32_gives_the_same_logits(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama3")
    assert worst_error(Replica(tmp_path, tp=2, block_size=32), reference) < TOLERANCE


def test_the_window_is_active_in_the_layers_that_slide_and_only_there(tmp_path: Path) -> None:
    """F143: window 64, prompt 200; the first of two layers sees everything."""
    reference = make_checkpoint(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1
    )
    replica = Replica(tmp_path)
    assert replica.model.windows == (0, 64)
    prompt = random_prompt(200, seed=5)
    blocks = list(range(1, 14))
    replica.step([Span(prompt[:150], 0, blocks, 0), Span([1, 2], 0, [20], 1)])
    logits = replica.step([Span(prompt[150:199], 150, blocks, 1)])[0]
    decoded = replica.step([Span(prompt[199:], 199, blocks, 1)])[0]
    expected = reference_logits(reference, prompt)
    assert (logits - expected[198]).abs().max() < TOLERANCE
    assert (decoded - expected[199]).abs().max() < TOLERANCE


def test_padded_columns_are_never_likely(tmp_path: Path) -> None:
    """F140: the tokenizer knows 90 tokens, the matrix has 101 rows."""
    make_checkpoint(tmp_path, "llama3")
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 88}},'
        ' "added_tokens": [{"id": 89, "content": "<e>"}]}'
    )
    replica = Replica(tmp_path, tp=3)
    assert replica.model.valid_vocab_size == 90
    logits_RV = replica.step([Span([1, 2, 3], 0, [0], 1)])
    assert logits_RV.shape == (1, VOCAB)
    assert torch.isfinite(logits_RV[:, :90]).all()
    assert torch.isneginf(logits_RV[:, 90:]).all()


def test_what_other_requests_left_in_a_block_never_shows(tmp_path: Path) -> None:
    """Blocks come back dirty; even NaN behind a sequence's end must change nothing."""
    reference = make_checkpoint(tmp_path, "mistral-window")
    replica = Replica(tmp_path, tp=2)
    for cache in replica.caches:
        cache.fill_(float("nan"))
    assert worst_error(replica, reference) < TOLERANCE


def test_a_step_that_wants_no_logits_gives_none_anywhere(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3")
    replica = Replica(tmp_path)
    batch = ForwardBatch.build([Span([1, 2], 0, [0], 0)], 16)
    assert replica.ranks[0].forward(batch, replica.caches[0]) is None


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama3")
    replica = Replica(tmp_path, tp=2, dtype="bfloat16")
    assert replica.caches[0].dtype == torch.bfloat16
    assert worst_error(replica, reference) < 0.3  # logits reach 6; bf16 keeps 8 bits
