"""Our own worker on a small model: it counts what the engine gives, and ends clean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import worker
from benchmarks.models import random_llama
from benchmarks.our_worker import OurBench, OurEngine
from benchmarks.serve import Bench
from benchmarks.worker import Worker, WorkerFailed

from ekiden.core.config import EngineConfig

torch.set_num_threads(1)
TINY = {
    "vocab_size": 30000,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("models") / "tiny", **TINY)


@pytest.fixture
def engine(tiny: Path) -> Any:
    config = EngineConfig(model_dir=tiny, model_name="tiny", max_model_len=256,
                          kv_cache_memory_bytes=4 << 20)  # fmt: skip
    made = OurEngine(config, processes=False)
    yield made
    made.close()


def test_tokens_and_steps_are_those_of_the_engine(engine: OurEngine):
    bench = Bench(engine)
    assert bench.prefill(tokens=40)["tokens"] == 1
    bench.open(batch=3, context=20, max_tokens=60)
    told = bench.decode(steps=5)
    assert (told["tokens"], told["steps"]) == (15, 5)
    assert 0 < told["compute_s"] <= told["seconds"]
    bench.close()
    assert bench.generate(batch=2, context=10, max_tokens=7)["tokens"] == 14


def test_every_request_of_the_streams_is_answered_so_many_at_a_time(engine: OurEngine):
    requests, most = [(10, 7), (12, 3), (9, 12), (30, 1), (5, 4)], 0
    step = engine.step

    def watched() -> int:
        nonlocal most
        most = max(most, engine.running)
        return step()

    engine.step = watched
    assert OurBench(engine).streams(batch=2, requests=requests)["tokens"] == 27
    assert (most, engine.running) == (2, 0)


def test_closing_forgets_every_stream(engine: OurEngine):
    bench = Bench(engine)
    bench.open(batch=3, context=20, max_tokens=60)
    bench.close()
    books = engine._engine.books()
    assert (books.requests, books.held) == (0, 0)


def test_prompts_never_repeat_so_none_is_found_in_the_cache(engine: OurEngine):
    bench = Bench(engine)
    for _ in range(2):
        bench.generate(batch=1, context=64, max_tokens=1)
    first, second = (bench.prompts(1, 64)[0] for _ in range(2))
    assert first[:16] != second[:16]


def test_a_worker_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "FOLDER", tmp_path)
    with pytest.raises(WorkerFailed, match="ours has ended") as failure:
        Worker("ours", "our_worker", [str(tmp_path / "nowhere")])
    assert "nowhere" in str(failure.value)


def test_a_worker_answers_over_its_pipe_whatever_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path
):
    monkeypatch.setattr(worker, "FOLDER", tmp_path)
    ours = Worker("ours", "our_worker", [str(tiny), "--threads", "1"])
    try:
        assert ours.call("prefill", tokens=20)["tokens"] == 1
    finally:
        ours.close()
    assert ours._process.returncode == 0
