"""What the start-up line foretells is what rank processes are seen to take at their peak."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import BLOCK, chunk, greedy

from ekiden.core.config import EngineConfig
from ekiden.engine.capacity import resolve_num_blocks
from ekiden.engine.memory import RankMemory, forecast, show
from ekiden.engine.plan import Chunk, StepPlan
from ekiden.engine.process_executor import ProcessExecutor
from ekiden.models.config import ModelConfig
from ekiden.models.hub import is_pulled, model_path
from ekiden.models.layout import kv_layout
from kv_transfer.messages import encode
from kv_transfer.options import PortOptions

TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
"""The shape of TinyLlama: 1.1 billion weights."""
SMOLLM2 = "smollm2-135m-instruct"
TOLERANCE = 0.10
SEQUENCES = 32
CONTEXT = 512
LENGTHS = [length << octave >> 3 for octave in (9, 8) for length in (8, 7, 6, 5)]
"""Of prompts whose steps share little memory with each other."""
STEP_TIMEOUT_S = 110.0


def peak_bytes(pid: int) -> int:
    """The most that a process has had resident so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def write_llama(path: Path, shape: dict[str, Any]) -> None:
    """A bfloat16 Llama, in three files; its weights repeat, for speed, and none is zero."""
    hidden, inner, vocab = (
        shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()

    def matrix(rows: int, columns: int) -> torch.Tensor:
        size = rows * columns
        return noise.repeat(-(-size // len(noise)))[:size].view(rows, columns)

    files: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for i in range(shape["num_hidden_layers"]):
        here, layer = files[i % 3], f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            here[f"{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            here[f"{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    files[0]["model.embed_tokens.weight"] = matrix(vocab, hidden)
    files[1]["lm_head.weight"] = matrix(vocab, hidden)
    files[2]["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    index = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05}-of-00003.safetensors"
        save_file(tensors, path / name)
        index.update(dict.fromkeys(tensors, name))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}
    (path / "config.json").write_text(
        json.dumps(config | shape | {"max_position_embeddings": 2048})
    )


@pytest.fixture(scope="module")
def billion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("billion")
    write_llama(path, TINY_LLAMA)
    yield path
    shutil.rmtree(path)  # pytest would keep the gigabytes of its last three runs


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_of_a_billion_weights_peaks_where_it_was_foretold(billion: Path, tp: int) -> None:
    check(billion, tp)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_of_smollm2_peaks_where_it_was_foretold(tp: int) -> None:
    if not is_pulled(SMOLLM2):
        pytest.skip(f"the model has not been fetched: ekiden models pull {SMOLLM2}")
    check(model_path(SMOLLM2), tp)


def check(path: Path, tp: int) -> None:
    model = ModelConfig.from_dir(path)
    config = EngineConfig(
        model_dir=path,
        model_name="m",
        tensor_parallel_size=tp,
        threads_per_rank=1,
        kv_cache_memory_bytes=1 << 30,
        max_model_len=2048,
    ).check()
    layout = kv_layout(model, config)
    # No hand-off comes, so the port's staging stays untouched and is left out.
    foretold = forecast(model, config, layout, resolve_num_blocks(model, config, layout))
    executor = ProcessExecutor(
        config,
        model,
        port="kv_transfer.port:open_port",
        port_options=encode(PortOptions()),
    )
    try:
        work(executor, model)
        seen = [peak_bytes(pid) for pid in executor.processes]
    finally:
        executor.close()
    report(path, tp, foretold, seen)
    for memory, peak in zip(foretold, seen, strict=True):
        assert abs(peak - memory.total) <= TOLERANCE * peak


def work(executor: ProcessExecutor, model: ModelConfig) -> None:
    """The largest steps of each kind: full chunks over a long context, odd ones, many rows."""
    tokens = [i % model.vocab_size for i in range(2048)]
    starts = [0, CONTEXT, 2 * CONTEXT, 3 * CONTEXT, 3 * CONTEXT + 301, 3 * CONTEXT + 401, 2047]
    steps: list[tuple[Chunk, ...]] = [
        (chunk(tokens, start, stop, samples=(greedy(),)),)
        for start, stop in pairwise([*starts, 2048])
    ]
    steps += [(chunk(tokens, 0, length, samples=(greedy(),)),) for length in LENGTHS]
    blocks = -(-CONTEXT // BLOCK)
    steps += 2 * [
        tuple(
            chunk(tokens, 99, 100, first_block=i * blocks, sequence=i, samples=(greedy(),))
            for i in range(SEQUENCES)
        )
    ]
    for number, chunks in enumerate(steps):
        executor.submit(StepPlan(number, chunks, ()))
        assert executor.collect(STEP_TIMEOUT_S).sampled


def report(path: Path, tp: int, foretold: Sequence[RankMemory], seen: Sequence[int]) -> None:
    for rank, (memory, peak) in enumerate(zip(foretold, seen, strict=True)):
        off = 100 * (peak - memory.total) / peak
        print(f"{path.name} TP{tp} rank {rank}: {memory}; seen {show(peak)} ({off:+.1f}%)")
