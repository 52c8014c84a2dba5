"""An engine over real ranks: who else is in the batch, and what is guessed, changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import save_tiny_llama, tiny_config, transformers_greedy

from ekiden.core.clock import MonotonicClock
from ekiden.core.config import SpeculativeConfig
from ekiden.core.types import Request, SamplingParams
from ekiden.engine.engine import Engine
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.models.config import ModelConfig
from ekiden.text.output import OutputText

torch.set_num_threads(1)
VOCAB = 128
SPECULATIVE = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "min_p": 0.1, "logprobs": 2, "n": 2},
    {"temperature": 0.2, "stop_token_ids": (9, 40), "min_tokens": 5},
    # Little to choose from, so that the answer repeats itself.
    {"temperature": 0.5, "logit_bias": {5: 9.0, 6: 9.0, 7: 9.0}},
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return save_tiny_llama(model_dir)


@pytest.fixture
def start(model_dir: Path, reference: Any) -> Iterator[Callable[..., Engine]]:
    """Starts engines and closes them."""
    started: list[InlineExecutor] = []

    def start_one(**fields: Any) -> Engine:
        fields = {"num_gpu_blocks_override": 256, "dtype": "float32"} | fields
        config = tiny_config(model_dir, **fields)
        started.append(InlineExecutor(config, ModelConfig.from_dir(model_dir)))
        return Engine(
            config,
            started[-1],
            eos_token_ids=(2,),
            vocab_size=VOCAB,
            max_model_len=256,
            model_fingerprint="tiny",
            text_factory=no_text,
            clock=MonotonicClock(),
        )

    yield start_one
    for executor in started:
        executor.close()


Start = Callable[..., Engine]


def no_text(stops: Sequence[str], min_tokens: int) -> OutputText:
    raise AssertionError("these requests have no stop strings")


def requests(count: int, longest: int = 120) -> list[Request]:
    """Prompts of 1 to ``longest`` tokens, some of them full of repeats, sampled in every way."""
    draw = random.Random(count)
    made = []
    for i in range(count):
        prompt = draw.choices(range(3, VOCAB), k=draw.randint(1, longest))
        if i % 3 == 0:
            prompt = (prompt[:7] * longest)[: len(prompt)]
        sampling = SAMPLINGS[i % len(SAMPLINGS)]
        params = SamplingParams(seed=i, max_tokens=draw.randint(5, 24), **sampling)
        made.append(
            Request(request_id=f"r{i}", model="tiny", prompt=tuple(prompt), sampling=params)
        )
    return made


Answers = Mapping[tuple[str, int], list[int]]


def answers(engine: Engine, *batch: Request) -> Answers:
    """All tokens of all choices, the requests being served together."""
    return serve(engine, *batch)[0]


def serve(engine: Engine, *batch: Request) -> tuple[Answers, int]:
    """The same, and how often one of them was preempted."""
    told: dict[tuple[str, int], list[int]] = {}
    preemptions = 0
    for request in batch:
        engine.add(request)
    while engine.has_work():
        output = engine.step(30.0)
        preemptions += sum(finished.preemptions for finished in output.finished)
        for delta in output.deltas:
            told.setdefault((delta.request_id, delta.choice), []).extend(delta.tokens)
            assert len(delta.logprobs) in (0, len(delta.tokens))
    assert engine.books().idle
    return told, preemptions


def alone(engine: Engine, *batch: Request) -> Answers:
    told: dict[tuple[str, int], list[int]] = {}
    for request in batch:
        told |= answers(engine, request)
    return told


def test_32_requests_of_mixed_length_get_the_same_tokens_as_one_by_one(start: Start) -> None:
    batch = requests(32)
    # No cache: every prompt is computed in the batch, in chunks beside the decode rows of others.
    engine = start(max_num_batched_tokens=96, max_num_seqs=48, enable_prefix_caching=False)
    together = answers(engine, *batch)
    assert together == alone(engine, *batch)
    assert sum(map(len, together.values())) > 400


def test_greedy_answers_are_those_of_transformers(start: Start, reference: Any) -> None:
    batch = [r for r in requests(32) if r.sampling == greedy_like(r.sampling)][:4]
    told = answers(start(speculative_config=SPECULATIVE), *batch)
    for request in batch:
        count = len(told[request.request_id, 0])
        expected = transformers_greedy(reference, request.prompt, count)
        assert told[request.request_id, 0] == expected


def greedy_like(sampling: SamplingParams) -> SamplingParams:
    return SamplingParams(seed=sampling.seed, max_tokens=sampling.max_tokens, temperature=0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 64},
        {"tp": 2},
        {"pp": 2, "max_num_batched_tokens": 64},
        {"block_size": 32, "enable_prefix_caching": False},
        # Blocks for less than two of the longest.
        {"num_gpu_blocks_override": 16, "max_num_seqs": 8},
    ],
)
def test_speculation_changes_no_token(start: Start, fields: dict[str, Any]) -> None:
    batch = requests(15)
    plain = answers(start(), *batch)
    engine = start(**fields, speculative_config=SPECULATIVE)
    assert answers(engine, *batch) == plain
    stats = engine.stats()
    assert stats.spec_proposed_tokens > stats.spec_accepted_tokens > 20
    # Once more, on top of what the first time left in the prefix cache.
    assert answers(engine, *batch) == plain


@pytest.mark.parametrize("config", [SpeculativeConfig(), SPECULATIVE])
def test_a_pool_for_one_and_a_half_requests_serves_four_rightly(
    start: Start, config: SpeculativeConfig
) -> None:
    batch = [
        Request(
            request_id=f"r{i}",
            model="tiny",
            prompt=tuple(range(3 + i, 33 + i)),
            sampling=SamplingParams(seed=i, max_tokens=24, ignore_eos=True, **sampling),
        )
        for i, sampling in enumerate([SAMPLINGS[i] for i in (0, 1, 2, 5)])
    ]
    expected = alone(start(), *batch)
    # 54 tokens are 4 blocks of 16.
    engine = start(num_gpu_blocks_override=6, max_model_len=96, speculative_config=config)
    told, preemptions = serve(engine, *batch)
    assert told == expected
    assert 0 < preemptions <= 6
    assert bool(engine.stats().spec_accepted_tokens) == bool(config.num_speculative_tokens)
