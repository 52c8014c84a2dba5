"""Planning a step ahead changes no token: the whole engine over real ranks, with it and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import PROMPT, save_tiny_llama, tiny_config

from ekiden.core.clock import MonotonicClock
from ekiden.core.types import Request, SamplingParams
from ekiden.engine.engine import Engine
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.models.config import ModelConfig

torch.set_num_threads(1)

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    # The last token decides the next one: two that are liked by turns.
    {"temperature": 0.0, "logit_bias": {5: 9.0, 6: 8.8}, "frequency_penalty": 0.5},
    {"temperature": 1.0, "n": 2, "min_tokens": 4},
    {"temperature": 1.0, "max_tokens": 1},
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def answers(model_dir: Path, **fields: Any) -> tuple[dict[tuple[str, int], list[Any]], int]:
    """(tokens and logprobs of each choice, most steps in flight at once)."""
    config = tiny_config(model_dir, **fields)
    model = ModelConfig.from_dir(model_dir)
    executor = InlineExecutor(config, model)
    engine = Engine(
        config,
        executor,
        eos_token_ids=range(0, 128, 9),
        vocab_size=model.vocab_size,
        max_model_len=256,
        model_fingerprint="tiny",
        text_factory=lambda stops, minimum: pytest.fail("no request has stop strings"),
        clock=MonotonicClock(),
    )
    said: dict[tuple[str, int], list[Any]] = {}
    most = 0
    try:
        for i, sampling in enumerate(SAMPLINGS):
            params = SamplingParams(**({"seed": i, "max_tokens": 12} | sampling))
            prompt = PROMPT[i : i + 5 + 7 * i]
            engine.add(Request(request_id=f"r{i}", model="m", prompt=prompt, sampling=params))
        while engine.has_work():
            output = engine.step(30.0)
            most = max(most, engine.in_flight + 1)
            for delta in output.deltas:
                key = (delta.request_id, delta.choice)
                said.setdefault(key, []).extend((*delta.tokens, delta.finish))
                # Another batch may sum in another order, which tokens do not show.
                said[key] += [(p.token, round(p.logprob, 3)) for p in delta.logprobs]
        assert engine.books().idle
    finally:
        executor.close()
    return said, most


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_tokens_are_those_of_an_engine_that_waits(model_dir: Path, tp: int, pp: int) -> None:
    fields = {"tp": tp, "pp": pp, "dtype": "float32", "max_num_batched_tokens": 64}
    waits, most = answers(model_dir, async_scheduling=False, **fields)
    assert most <= pp
    ahead, most = answers(model_dir, **fields)
    assert most == pp + 1
    assert len(ahead) == len(SAMPLINGS) + 1
    assert ahead == waits
