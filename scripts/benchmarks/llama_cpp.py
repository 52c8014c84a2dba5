"""llama.cpp through its own benches: ``llama-bench`` for prompts, ``llama-batched-bench`` beside it
for streams. Each run is a process that loads the model anew; loading is not measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.work import Decode, Prefill, Work
from benchmarks.worker import CALL_TIMEOUT_S, WorkerFailed

BATCHED = "llama-batched-bench"
SPARE_TOKENS = 64


class LlamaCpp:
    """Implements ``contenders.Contender``."""

    def __init__(self, name: str, bench: Path, model: Path, threads: int) -> None:
        """Raises WorkerFailed where the second program is missing."""
        self.name = name
        self._bench = bench
        self._batched = bench.with_name(BATCHED)
        self._model = model
        self._threads = str(threads)
        if not self._batched.exists():
            raise WorkerFailed(f"{self._batched} is missing: build it with llama-bench")

    def open(self, work: Work, tokens: int) -> None:
        pass

    def run(self, work: Work, steps: int) -> float:
        match work:
            case Prefill(prompt):
                return self._prefill(prompt)
            case Decode(batch, context):
                return self._decode(batch, context, steps)

    def close(self, work: Work) -> None:
        pass

    def end(self) -> None:
        pass

    def _prefill(self, prompt: int) -> float:
        args = ["-p", str(prompt), "-n", "0", "-r", "1", "-o", "json"]
        return float(json.loads(self._output(self._bench, args))[0]["avg_ts"])

    def _decode(self, batch: int, context: int, steps: int) -> float:
        """One prompt is computed and its cache copied to every stream."""
        room = batch * (context + steps + SPARE_TOKENS)
        args = ["-c", str(room), "-npp", str(context), "-ntg", str(steps), "-npl", str(batch)]
        args += ["-pps", "--output-format", "jsonl"]
        return float(decode_figures(self._output(self._batched, args), batch, steps)["speed_tg"])

    def _output(self, program: Path, args: list[str]) -> str:
        command = [str(program), "-m", str(self._model), "-t", self._threads, *args]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise WorkerFailed(
                f"{self.name}: {' '.join(command)} took over {CALL_TIMEOUT_S} s"
            ) from None
        if done.returncode:
            raise WorkerFailed(f"{self.name}: {' '.join(command)}\n{done.stderr[-2000:]}")
        return done.stdout


def decode_figures(output: str, batch: int, steps: int) -> dict[str, Any]:
    """The line of JSON that speaks of this run. Raises WorkerFailed where there is none."""
    for line in output.splitlines():
        if line.startswith("{"):
            figures: dict[str, Any] = json.loads(line)
            if (figures["pl"], figures["tg"]) == (batch, steps):
                return figures
    raise WorkerFailed(f"{BATCHED} said nothing of batch {batch}: {output[-500:]!r}")
