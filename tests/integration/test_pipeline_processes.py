"""Rank processes of a pipeline: no stage idles more than the textbook says, by their own clocks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama, tiny_config

from ekiden.core.clock import MonotonicClock
from ekiden.core.types import ReplicaStats, Request, SamplingParams
from ekiden.engine.engine import Engine, EngineOutput
from ekiden.engine.loop import EngineLoop
from ekiden.engine.process_executor import ProcessExecutor
from ekiden.models.config import ModelConfig

WAIT = 60.0
TOKENS = 24


class Session:
    """An engine on its ranks' thread, as a service runs it, and what it said."""

    def __init__(self, engine: Engine, executor: ProcessExecutor, requests: int) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.busy = ReplicaStats()
        """While every request was running."""
        self._left = requests
        self._over = threading.Event()
        self.failure: BaseException | None = None
        self.loop = EngineLoop(engine, executor, self._hear, self._fail)
        self.loop.start()

    def _hear(self, output: EngineOutput) -> None:
        for delta in output.deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
        if not output.finished and self._left == self.engine.stats().running:
            self.busy = self.engine.stats()
        self._left -= len(output.finished)
        if not self._left:
            self._over.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._over.set()

    def serve(self, requests: list[Request]) -> None:
        for request in requests:
            self.loop.call(lambda engine, request=request: engine.add(request))  # type: ignore[misc]
        assert self._over.wait(WAIT)
        self.loop.stop(WAIT)
        assert self.failure is None


@pytest.mark.parametrize("pp", [2, 3])
def test_no_stage_idles_more_than_the_textbook_says(tmp_path: Path, pp: int) -> None:
    save_tiny_llama(tmp_path)
    config = tiny_config(tmp_path, pp=pp, max_num_seqs=16)
    model = ModelConfig.from_dir(tmp_path)
    executor = ProcessExecutor(config, model, port="delay_port:delay")
    try:
        engine = Engine(
            config,
            executor,
            eos_token_ids=(),
            vocab_size=model.vocab_size,
            max_model_len=256,
            model_fingerprint="tiny",
            text_factory=lambda stops, minimum: pytest.fail("no request has stop strings"),
            clock=MonotonicClock(),
        )
        requests = [
            Request(
                request_id=f"r{i}",
                model="m",
                prompt=(7 * i, 7 * i + 1, 7 * i + 2),
                sampling=SamplingParams(seed=i, max_tokens=TOKENS, temperature=0.0),
            )
            for i in range(4 * pp)
        ]
        session = Session(engine, executor, len(requests))
        session.serve(requests)
    finally:
        executor.close()
    for i, request in enumerate(requests):
        assert session.tokens[request.request_id] == [
            (7 * i + 3 + step) % model.vocab_size for step in range(TOKENS)
        ]
    # As many micro-batches as stages are in flight; a pipeline that works on one at a time idles
    # 1 - 1 / pp, which is more.
    bound = (pp - 1) / (pp + pp - 1) + 0.05
    assert len(session.busy.stage_idle) == pp
    assert max(session.busy.stage_idle) < bound, session.busy
