"""What does not fit is refused before anything is taken, by a sentence that shows the sum."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import save_tiny_llama

from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.engine.activations import activation_bytes
from ekiden.engine.admission import admit
from ekiden.engine.capacity import resolve_num_blocks
from ekiden.engine.cuda_memory import CardMemory
from ekiden.engine.ledger import Ledger
from ekiden.engine.memory import (
    CPU_OVERHEAD,
    CUDA_OVERHEAD,
    SERVICE_OVERHEAD,
    RankMemory,
    forecast,
    show,
    table,
)
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def model(path: Path) -> ModelConfig:
    return ModelConfig.from_dir(path)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "bookings", resident=lambda pid: 0)


def config(path: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model_dir=path, model_name="tiny", **fields)


def foretold(model: ModelConfig, engine: EngineConfig) -> tuple[RankMemory, ...]:
    layout = kv_layout(model, engine)
    return forecast(model, engine, layout, resolve_num_blocks(model, engine, layout))


def need(model: ModelConfig, engine: EngineConfig) -> int:
    return sum(rank.total for rank in foretold(model, engine)) + SERVICE_OVERHEAD


def card(free: float, total: float = 24) -> CardMemory:
    return CardMemory(free=int(free * GIB), total=int(total * GIB))


def test_a_replica_that_just_fits_is_admitted_and_a_byte_less_is_not(
    path: Path, model: ModelConfig, ledger: Ledger
) -> None:
    engine = config(path, tensor_parallel_size=2)
    size = need(model, engine)
    with admit(model, engine, "r", available=lambda: size, ledger=ledger):
        pass
    with pytest.raises(SetupError) as caught:
        admit(model, engine, "r", available=lambda: size - 1, ledger=ledger)
    said = caught.value.message
    for rank in foretold(model, engine):
        for part in (rank.weights, rank.kv_cache, rank.activations, rank.overhead, rank.total):
            assert show(part) in said
    assert show(size) in said
    assert "lower --kv-cache-memory" in said
    assert "\n" not in said


def test_two_replicas_that_start_together_cannot_both_have_the_same_room(
    path: Path, model: ModelConfig, ledger: Ledger
) -> None:
    engine = config(path)
    size = need(model, engine)
    room = 2 * size - 1
    with admit(model, engine, "one", available=lambda: room, ledger=ledger):
        with pytest.raises(SetupError, match="promised to replicas that are starting"):
            admit(model, engine, "two", available=lambda: room, ledger=ledger)
        with admit(model, engine, "two", available=lambda: room + 1, ledger=ledger):
            pass
    with admit(model, engine, "two", available=lambda: room, ledger=ledger):
        pass


def test_the_start_up_lines_name_every_part_of_every_rank(
    path: Path, model: ModelConfig, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    engine = config(path, tensor_parallel_size=2)
    with (
        caplog.at_level(logging.INFO),
        admit(model, engine, "r", staging=64 * MIB, available=lambda: 9 * GIB, ledger=ledger),
    ):
        pass
    ranks, sum_line = caplog.messages
    assert ranks.startswith("memory of each of ranks 0-1: ")
    for part in ("weights", "512 MiB KV", "activations", "64 MiB staging", "260 MiB overhead"):
        assert part in ranks
    assert "in 2 ranks + 250 MiB service = " in sum_line
    assert "of 9.00 GiB available" in sum_line


def test_an_uneven_split_says_at_start_up_what_it_costs(
    path: Path, model: ModelConfig, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """F141. Eight heads over three ranks: one has four, where 8 / 3 would be its share."""
    for tp in (2, 3):
        with admit(
            model,
            config(path, tensor_parallel_size=tp),
            "r",
            available=lambda: 99 * GIB,
            ledger=ledger,
        ):
            pass
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["8 heads do not divide by -tp 3: attention takes 50% longer than if they did"]


def test_where_memory_is_unknown_that_is_said(
    path: Path, model: ModelConfig, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    with admit(model, config(path), "r", available=lambda: None, ledger=ledger):
        pass
    assert "nothing was checked" in caplog.text


def test_kv_memory_is_what_was_asked_for_less_a_part_of_a_block(
    path: Path, model: ModelConfig
) -> None:
    for fields, asked in (({}, GIB), ({"kv_cache_memory_bytes": 10 * MIB}, 10 * MIB)):
        for split in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}):
            engine = config(path, **fields, **split)
            kv = sum(rank.kv_cache for rank in foretold(model, engine))
            layout = kv_layout(model, engine)
            assert asked - layout.token_bytes() * 16 < kv <= asked


@pytest.mark.parametrize("free", [20.0, 5.0])
def test_cards_give_kv_what_utilisation_leaves(path: Path, model: ModelConfig, free: float) -> None:
    engine = config(path, device="cuda", tensor_parallel_size=2, gpu_memory_utilization=0.5)
    layout = kv_layout(model, engine)
    cards = (card(20.0), card(free))
    blocks = resolve_num_blocks(model, engine, layout, cards=lambda: cards)
    ranks = forecast(model, engine, layout, blocks)
    budget = min(12.0, free) * GIB
    worst = max(rank.total for rank in ranks)
    assert budget - layout.block_bytes(1) < worst <= budget
    assert {rank.overhead for rank in ranks} == {CUDA_OVERHEAD}


def test_memory_that_was_asked_for_wins_over_utilisation(path: Path, model: ModelConfig) -> None:
    engine = config(path, device="cuda", kv_cache_memory_bytes=10 * MIB)
    blocks = resolve_num_blocks(model, engine, kv_layout(model, engine), cards=pytest.fail)
    assert blocks == 10 * MIB // (kv_layout(model, engine).token_bytes() * 16)


def test_cards_too_few_or_too_small_are_refused_by_the_option(
    path: Path, model: ModelConfig
) -> None:
    engine = config(path, device="cuda", tensor_parallel_size=2)
    layout = kv_layout(model, engine)
    with pytest.raises(SetupError, match="a card for each of 2 ranks, and there are 1"):
        resolve_num_blocks(model, engine, layout, cards=lambda: (card(20),))
    with pytest.raises(SetupError, match=r"--gpu-memory-utilization 0\.9 leaves KV for 0 tokens"):
        resolve_num_blocks(model, engine, layout, cards=lambda: (card(0.1), card(20)))


def test_kv_that_a_card_cannot_hold_is_refused_before_it_is_allocated(
    path: Path, model: ModelConfig
) -> None:
    engine = config(path, device="cuda", kv_cache_memory_bytes=8 * GIB)
    with admit(model, engine, "r", cards=lambda: (card(20),)):
        pass
    with pytest.raises(
        SetupError, match=r"rank 0 does not fit its card: .* of 24\.00 GiB are free"
    ):
        admit(model, engine, "r", cards=lambda: (card(8),))


Activations = Callable[..., int]


@pytest.fixture
def activations(path: Path, model: ModelConfig) -> Activations:
    def resolve(rank: int = 0, **fields: Any) -> int:
        engine = config(path, **fields)
        return activation_bytes(model, engine, kv_layout(model, engine), rank)

    return resolve


def test_activations_follow_the_tokens_of_a_step_and_the_dtype(activations: Activations) -> None:
    plain = activations()
    assert activations(max_num_batched_tokens=1024) > plain
    assert activations(dtype="bfloat16") < plain


def test_only_the_last_stage_has_logits_and_only_its_first_rank_all_of_them(
    activations: Activations,
) -> None:
    split = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "max_num_seqs": 512}
    grown = [
        activations(rank, **split) - activations(rank, **(split | {"max_num_seqs": 1}))
        for rank in range(4)
    ]
    assert grown[0] == grown[1] == 0
    assert grown[2] > grown[3]


def test_native_kernels_keep_spare_memory_for_steps_of_other_lengths_up_to_a_bound(
    path: Path, model: ModelConfig
) -> None:
    def spare(**fields: Any) -> int:
        return foretold(model, config(path, **fields))[0].spare

    few, more = (spare(max_num_batched_tokens=tokens) for tokens in (512, 1024))
    assert 0 < few < more <= 2 * few
    assert spare(max_num_batched_tokens=1 << 22) == 256 * MIB
    assert spare(kernels="torch") == 0
    assert f"{show(few)} spare" in str(foretold(model, config(path))[0])


def test_ranks_that_are_alike_share_a_line() -> None:
    one = RankMemory(
        weights=1, kv_cache=2, activations=3, spare=0, staging=0, overhead=CPU_OVERHEAD
    )
    two = RankMemory(weights=GIB, kv_cache=2, activations=3, spare=0, staging=0, overhead=4)
    lines = table([one, one, two])
    assert [line.split(":")[0] for line in lines] == [
        "memory of each of ranks 0-1",
        "memory of rank 2",
    ]
    assert table([]) == []
