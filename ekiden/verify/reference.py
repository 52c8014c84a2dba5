"""The truth: one process, one rank, no transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ekiden.core.config import EngineConfig
from ekiden.core.types import Delta, Request, SamplingParams
from ekiden.engine.build import build_engine
from ekiden.engine.engine import Engine
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.models.config import ModelConfig

from .compare import Reference, Top

STEP_TIMEOUT_S = 120.0
TOP = 4
"""Logprobs compared at each position: those of the most likely tokens."""

Progress = Callable[[int, int], None]


def greedy(seed: int, max_tokens: int) -> SamplingParams:
    """Greedy decoding that never stops early, so that every prompt gives as many tokens."""
    return SamplingParams(
        seed=seed, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=TOP
    )


class Record:
    """What one prompt gave, as its deltas come."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.tops: list[Top] = []

    def add(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        self.tops.extend(entry.top for entry in delta.logprobs)

    def reference(self) -> Reference:
        return Reference(
            prompt=self.prompt,
            tokens=tuple(self.tokens),
            gaps=tuple(top[0][1] - top[1][1] for top in self.tops),
            tops=tuple(self.tops),
        )


def reference_tokens(
    config: EngineConfig, prompts: Sequence[tuple[int, ...]], max_tokens: int, progress: Progress
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
    progress: Progress,
) -> list[Reference]:
    records = [Record(prompt) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        sampling = greedy(number, max_tokens)
        engine.add(
            Request(
                request_id=str(number), model=config.model_name, prompt=prompt, sampling=sampling
            )
        )
    while engine.has_work():
        for delta in engine.step(STEP_TIMEOUT_S).deltas:
            records[int(delta.request_id)].add(delta)
        progress(sum(len(r.tokens) for r in records), len(prompts) * max_tokens)
    return [record.reference() for record in records]
