"""The engine without services, on one rank of this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekiden.core.config import EngineConfig
from ekiden.core.types import Request, SamplingParams
from ekiden.engine.build import build_engine
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.models.config import ModelConfig

STEP_TIMEOUT_S = 300.0


class BareEngine:
    """Engine and executor over a checkpoint; a context that closes both."""

    def __init__(self, path: Path, device: str, **fields: Any) -> None:
        """``fields`` are EngineConfig's."""
        config = EngineConfig(
            model_dir=path,
            model_name="check",
            device=device,
            max_model_len=4096 if device == "cuda" else 256,
            enable_prefix_caching=False,
            **{"kv_cache_memory_bytes": 4 << 30 if device == "cuda" else 8 << 20, **fields},
        )
        model = ModelConfig.from_dir(path)
        self._executor = InlineExecutor(config, model)
        self._engine = build_engine(config, self._executor, model)

    def __enter__(self) -> BareEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()

    def start(self, prompts: Sequence[Sequence[int]], tokens: int, logprobs: int | None) -> None:
        """Queue greedy requests of exactly ``tokens`` tokens; their ids are their places."""
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(
                seed=1, max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs
            )
            request = Request(
                request_id=str(number), model="check", prompt=tuple(prompt), sampling=sampling
            )
            self._engine.add(request)

    def step(self) -> dict[int, int]:
        """Run a step: how many tokens each request got."""
        return {
            int(delta.request_id): len(delta.tokens)
            for delta in self._engine.step(STEP_TIMEOUT_S).deltas
        }

    @property
    def has_work(self) -> bool:
        return self._engine.has_work()

    def greedy(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> list[list[tuple[int, float]]]:
        """Each request's tokens, and by how much each was ahead of the second best."""
        self.start(prompts, tokens, logprobs=2)
        answers: list[list[tuple[int, float]]] = [[] for _ in prompts]
        while self._engine.has_work():
            for delta in self._engine.step(STEP_TIMEOUT_S).deltas:
                gaps = [entry.top[0][1] - entry.top[1][1] for entry in delta.logprobs]
                answers[int(delta.request_id)] += zip(delta.tokens, gaps, strict=True)
        return answers
