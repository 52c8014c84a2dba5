"""The worker's side of ``worker.py``. Standard library only: a peer's environment runs it too."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

TOKENS = range(1000, 30000)
"""Ordinary tokens of every model that is measured."""


class Engine(Protocol):
    """An engine that is driven step by step, so that several can take turns on one machine."""

    def start(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Add requests: greedy, no end before ``max_tokens``."""

    def step(self) -> int:
        """Run one step; the output tokens that came out of it."""

    def stop(self) -> None:
        """Forget all requests."""

    def counters(self) -> dict[str, float]:
        """Figures of the engine's own, adding up over its life; empty for most."""


def serve(make: Callable[[], Engine], bench: type[Bench] | None = None) -> None:
    """Make the engine, say so, then answer until the input closes.

    ``prefill`` of ``tokens``; ``open`` of ``batch`` streams with ``context`` tokens each, then
    ``decode`` of ``steps``, then ``close``; ``generate`` for ``batch`` prompts of ``context``
    tokens, prefill included. What takes time answers with ``seconds``, the output ``tokens``, and
    what was added to the engine's counters. ``bench`` may have more operations.
    """
    answers = _private_output()
    engine = make()
    operations = (bench or Bench)(engine)
    _say(answers, {"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        _say(answers, getattr(operations, command.pop("op"))(**command))


class Bench:
    """The operations, by name. Prompts never repeat, so nothing is found in a prefix cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._chance = random.Random(1)
        self._batch = 0

    def prefill(self, tokens: int) -> dict[str, float]:
        return self.timed(self.prompts(1, tokens), 1, 1)

    def open(self, batch: int, context: int, max_tokens: int) -> dict[str, float]:
        self.engine.start(self.prompts(batch, context), max_tokens)
        self._batch = batch
        self.run(3 * batch)  # all are decoding, and what the first steps set up is set up
        return {}

    def decode(self, steps: int) -> dict[str, float]:
        return self.timed([], 0, steps * self._batch)

    def close(self) -> dict[str, float]:
        self.engine.stop()
        return {}

    def generate(self, batch: int, context: int, max_tokens: int) -> dict[str, float]:
        return self.timed(self.prompts(batch, context), max_tokens, batch * max_tokens)

    def timed(self, prompts: list[list[int]], max_tokens: int, tokens: int) -> dict[str, float]:
        """Start the prompts, if there are any, and run until so many tokens came out."""
        before = self.engine.counters()
        began = time.perf_counter()
        if prompts:
            self.engine.start(prompts, max_tokens)
        done = self.run(tokens)
        seconds = time.perf_counter() - began
        added = {name: now - before[name] for name, now in self.engine.counters().items()}
        return {"seconds": seconds, "tokens": done, **added}

    def run(self, tokens: int) -> int:
        done = 0
        while done < tokens:
            done += self.engine.step()
        return done

    def prompts(self, batch: int, tokens: int) -> list[list[int]]:
        return [self._chance.choices(TOKENS, k=tokens) for _ in range(batch)]


def _private_output() -> int:
    """The descriptor for answers; whatever else the process prints goes to its error output."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def _say(answers: int, what: dict[str, Any]) -> None:
    os.write(answers, (json.dumps(what) + "\n").encode())
