"""The truth: one process, one rank, no transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ekiden.core.config import EngineConfig
from ekiden.core.types import Request, SamplingParams
from ekiden.engine.build import build_engine
from ekiden.engine.engine import Engine
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.models.config import ModelConfig

from .compare import Reference

STEP_TIMEOUT_S = 120.0


def greedy(seed: int, max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    """Greedy decoding that never stops early, so that every prompt gives as many tokens."""
    return SamplingParams(
        seed=seed, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs
    )


def reference_tokens(
    config: EngineConfig,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    progress: Callable[[int, int], None],
) -> list[Reference]:
    """What one process generates for each prompt, with the margin of every token."""
    model = ModelConfig.from_dir(config.model_dir)
    executor = InlineExecutor(config, model)
    try:
        engine = build_engine(config, executor, model)
        return _generate(engine, config, prompts, max_tokens, progress)
    finally:
        executor.close()


def _generate(
    engine: Engine,
    config: EngineConfig,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    progress: Callable[[int, int], None],
) -> list[Reference]:
    tokens: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        sampling = greedy(number, max_tokens, logprobs=2)
        engine.add(
            Request(
                request_id=str(number), model=config.model_name, prompt=prompt, sampling=sampling
            )
        )
    while engine.has_work():
        for delta in engine.step(STEP_TIMEOUT_S).deltas:
            number = int(delta.request_id)
            tokens[number].extend(delta.tokens)
            gaps[number].extend(entry.top[0][1] - entry.top[1][1] for entry in delta.logprobs)
        progress(sum(map(len, tokens)), len(prompts) * max_tokens)
    return [
        Reference(prompt=prompt, tokens=tuple(tokens[number]), gaps=tuple(gaps[number]))
        for number, prompt in enumerate(prompts)
    ]
