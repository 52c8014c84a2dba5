"""Our engine without services: one process, or a process for each rank with ``--tp``."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve import Bench, serve
from ekiden.core.config import EngineConfig
from ekiden.core.types import Request, SamplingParams
from ekiden.engine.build import build_engine
from ekiden.engine.executor import Executor
from ekiden.engine.inline_executor import InlineExecutor
from ekiden.engine.plan import StepPlan, StepResult
from ekiden.engine.process_executor import ProcessExecutor
from ekiden.models.config import ModelConfig

MAX_MODEL_LEN = 4096
COUNTED = ("compute_s", "collective_s", "collective_bytes", "idle_s")


class Counted:
    """An executor that adds up what its steps say of themselves."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.sums: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)

    def collect(self, timeout_s: float) -> StepResult:
        result = self._executor.collect(timeout_s)
        self.sums["steps"] += 1
        for name in COUNTED:
            self.sums[name] += getattr(result, name)
        return result


class OurEngine:
    """Implements ``serve.Engine``."""

    def __init__(self, config: EngineConfig, *, processes: bool) -> None:
        model = ModelConfig.from_dir(config.model_dir)
        run = ProcessExecutor if processes else InlineExecutor
        self._executor = Counted(run(config, model))
        self._engine = build_engine(config, self._executor, model)
        self._name = config.model_name
        self._numbers = itertools.count()
        self._known: set[str] = set()

    def start(self, prompts: list[list[int]], max_tokens: int) -> None:
        for prompt in prompts:
            number = next(self._numbers)
            sampling = SamplingParams(
                seed=number, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            )
            self._known.add(str(number))
            self._engine.add(
                Request(
                    request_id=str(number),
                    model=self._name,
                    prompt=tuple(prompt),
                    sampling=sampling,
                )
            )

    def step(self) -> int:
        output = self._engine.step()
        self._known -= {finished.request_id for finished in output.finished}
        return sum(len(delta.tokens) for delta in output.deltas)

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._known)

    def stop(self) -> None:
        for request_id in self._known:
            self._engine.cancel(request_id)
        self._known.clear()
        while self._engine.has_work():
            self._engine.step()

    def counters(self) -> dict[str, float]:
        return {name: float(self._executor.sums[name]) for name in ("steps", *COUNTED)}

    def close(self) -> None:
        self._executor.close()


class OurBench(Bench):
    """What peers need not do as well."""

    engine: OurEngine

    def streams(self, batch: int, requests: list[tuple[int, int]]) -> dict[str, float]:
        """Answer ``requests``, each tokens of prompt and of answer, ``batch`` at a time."""
        waiting = [(self.prompts(1, prompt), answer) for prompt, answer in reversed(requests)]
        began, tokens = time.perf_counter(), 0
        while waiting or self.engine.running:
            while waiting and self.engine.running < batch:
                self.engine.start(*waiting.pop())
            tokens += self.engine.step()
        return {"seconds": time.perf_counter() - began, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="all ranks together")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--processes", action="store_true", help="ranks are processes")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE",
                        help="a field of EngineConfig, as text")  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(args.threads)  # ranks that are processes are told theirs
    config = EngineConfig(
        model_dir=args.model_dir,
        model_name=args.model_dir.name,
        max_model_len=MAX_MODEL_LEN,
        tensor_parallel_size=args.tp,
        threads_per_rank=max(1, args.threads // args.tp),
        **dict(setting.split("=", 1) for setting in args.set),
    )
    serve(lambda: OurEngine(config, processes=args.processes or args.tp > 1), OurBench)


if __name__ == "__main__":
    main()
