"""`make bench-pipeline`: how busy each stage of a pipeline is, and what planning ahead gains.

Rank processes decode, one thread each, with steps planned ahead and without, in turns. A stage's
busy share comes from the engine's own counters; beside it stands what the textbook allows, with M
micro-batches over S stages: 1 - (S - 1) / (M + S - 1), less 5 points. Writes
build/bench/pipeline.json.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from statistics import median

from benchmarks.models import SMOLLM2, model_dir
from benchmarks.options import add_common, pin, result_name
from benchmarks.results import Row, publish, row

from ekiden.core.config import EngineConfig
from ekiden.core.types import Request, SamplingParams
from ekiden.engine.build import build_engine
from ekiden.engine.engine import EngineOutput
from ekiden.engine.loop import EngineLoop
from ekiden.engine.process_executor import ProcessExecutor
from ekiden.models.config import ModelConfig

WAIT_S = 600.0
MODES = {"planned ahead": True, "waiting for each step": False}


class Replica:
    """One engine on its own thread, as a service runs it."""

    def __init__(self, config: EngineConfig) -> None:
        model = ModelConfig.from_dir(config.model_dir)
        self._executor = ProcessExecutor(config, model)
        self._engine = build_engine(config, self._executor, model)
        self._left, self._over = 0, threading.Event()
        self._busy: tuple[float, ...] = ()
        self._loop = EngineLoop(self._engine, self._executor, self._hear, self._fail)
        self._loop.start()

    def _hear(self, output: EngineOutput) -> None:
        if not output.finished:
            self._busy = tuple(1.0 - idle for idle in self._engine.stats().stage_idle)
        self._left -= len(output.finished)
        if self._left <= 0:
            self._over.set()

    def _fail(self, error: BaseException) -> None:
        sys.exit(f"the engine failed: {error}")

    def decode(self, streams: int, tokens: int, seed: int) -> tuple[float, tuple[float, ...]]:
        """(output tokens a second, busy share of each stage while all streams ran)."""
        self._left = streams
        self._over.clear()
        began = time.monotonic()
        for i in range(streams):
            prompt = tuple((seed + 31 * i + 7 * place) % 1000 + 5 for place in range(16))
            sampling = SamplingParams(seed=i, max_tokens=tokens, temperature=0.0, ignore_eos=True)
            request = Request(request_id=f"{seed}-{i}", model="m", prompt=prompt, sampling=sampling)
            self._loop.call(lambda engine, request=request: engine.add(request))  # type: ignore[misc]
        if not self._over.wait(WAIT_S):
            sys.exit(f"{streams} streams of {tokens} tokens took over {WAIT_S:g} s")
        return streams * tokens / (time.monotonic() - began), self._busy

    def close(self) -> None:
        self._loop.stop(WAIT_S)
        self._executor.close()


def main() -> int:
    args = parse()
    pin(args.threads)
    path = model_dir(args.model)
    replicas = {name: Replica(configure(path, args.pp, ahead)) for name, ahead in MODES.items()}
    try:
        publish(result_name("pipeline", args), measure(args, replicas))
    finally:
        for replica in replicas.values():
            replica.close()
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--model", default=SMOLLM2, help=f"default: {SMOLLM2}")
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="stages (default: 2)")
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="default: 16")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="a stream (default: 64)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    args = parser.parse_args()
    if args.quick:
        args.streams, args.tokens, args.rounds = 4, 8, 1
    return args


def configure(path: Path, pp: int, ahead: bool) -> EngineConfig:
    return EngineConfig(
        model_dir=path,
        model_name=path.name,
        max_model_len=1024,
        pipeline_parallel_size=pp,
        threads_per_rank=1,
        async_scheduling=ahead,
    )


def measure(args: argparse.Namespace, replicas: dict[str, Replica]) -> list[Row]:
    rates: dict[str, list[float]] = {name: [] for name in replicas}
    busy: dict[str, list[tuple[float, ...]]] = {name: [] for name in replicas}
    for turn in range(args.rounds + 1):  # the first one warms up
        for name, replica in replicas.items():
            rate, shares = replica.decode(args.streams, args.tokens, seed=1000 * turn)
            if turn:
                rates[name].append(rate)
                busy[name].append(shares)
    ahead, waiting = MODES
    what = f"{args.model}, {args.pp} stages, {args.streams} streams"
    allowed = 0.95 - (args.pp - 1) / (2 * args.pp - 1)
    rows = [
        row(what, median(rates[ahead]), "tokens/s", peer=median(rates[waiting]), peer_name=waiting)
    ]
    for name in replicas:
        for stage, shares in enumerate(zip(*busy[name], strict=True)):
            says = f"{what}, {name}: stage {stage} busy"
            limit = {"peer": allowed, "peer_name": "textbook less 5 points", "goal": 1.0}
            rows.append(row(says, median(shares), "share of the time", **limit))
    return rows


if __name__ == "__main__":
    sys.exit(main())
