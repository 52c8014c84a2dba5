"""``transformers``: one forward call a step over all streams, the cache that is faster here."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.serve import serve

CACHES = ("static", "dynamic")
TRIAL_STEPS = 6
"""The first one is the prompt."""


class Transformers:
    """Implements ``serve.Engine``. A batch starts and stops together, as ``generate`` has it."""

    def __init__(self, model_dir: Path, cache: str) -> None:
        """``cache``: ``static``, ``dynamic``, or ``auto`` for the one that decodes faster here."""
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._cache: Any = None
        self._next_B1: Any = None
        """The prompts [batch, tokens] before the first step, the last tokens after it."""
        self._kind = cache
        if cache == "auto":
            self._kind = min(CACHES, key=self._trial)
            print(f"cache: {self._kind}, for it was the faster", file=sys.stderr)

    def _trial(self, kind: str) -> float:
        """Seconds of the fastest of a few steps at batch 8."""
        self._kind = kind
        self.start([[1000 + row] * 128 for row in range(8)], TRIAL_STEPS)
        times = []
        for _ in range(TRIAL_STEPS):
            began = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - began)
        self.stop()
        return min(times)

    def start(self, prompts: list[list[int]], max_tokens: int) -> None:
        length = len(prompts[0]) + max_tokens
        self._next_B1 = torch.tensor(prompts)
        if self._kind == "static":
            self._cache = StaticCache(config=self._model.config, max_cache_len=length)
        else:
            self._cache = DynamicCache()

    @torch.inference_mode()
    def step(self) -> int:
        output = self._model(
            input_ids=self._next_B1, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._next_B1 = output.logits[:, -1].argmax(-1, keepdim=True)
        return len(self._next_B1)

    def stop(self) -> None:
        self._cache = self._next_B1 = None

    def counters(self) -> dict[str, float]:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", choices=(*CACHES, "auto"), default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    serve(lambda: Transformers(args.model_dir, args.cache))


if __name__ == "__main__":
    main()
