"""A Llama of a few hundred kilobytes with random weights, and plans to drive its ranks with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekiden.core.config import EngineConfig
from ekiden.engine.executor import Executor
from ekiden.engine.history import TokenCounts
from ekiden.engine.plan import Chunk, SampleSpec, StepPlan

BLOCK = 16
PROMPT = tuple(range(5, 46))
"""41 tokens: two whole blocks and a part."""


def save_tiny_llama(path: Path, *, seed: int = 0, shards: str = "10MB", **changes: int) -> Any:
    """Write a checkpoint (4 layers, 8 heads, 2 KV heads, 128 tokens) and return its model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(**(fields | changes))
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path, max_shard_size=shards)
    return model


def tiny_config(path: Path, *, tp: int = 1, pp: int = 1, **fields: Any) -> EngineConfig:
    values: dict[str, Any] = {"num_gpu_blocks_override": 32, "threads_per_rank": 1} | fields
    return EngineConfig(
        model_dir=path,
        model_name="tiny",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        **values,
    )


def greedy(*, prompt: Sequence[int] = (), output: Sequence[int] = (), **fields: Any) -> SampleSpec:
    """A spec without any rule but those in ``fields``; ``prompt`` and ``output`` as penalised."""
    seen, seen_counts = TokenCounts(prompt, output).snapshot()
    values: dict[str, Any] = {
        "choice": 0,
        "seed": 1,
        "position": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "banned": (),
        "seen": seen,
        "seen_counts": seen_counts,
        "logprobs": None,
    }
    return SampleSpec(**(values | fields))


def chunk(
    tokens: Sequence[int],
    start: int,
    stop: int,
    *,
    first_block: int = 0,
    sequence: int = 1,
    samples: tuple[SampleSpec, ...] = (),
    session: int = 0,
) -> Chunk:
    """Positions [start, stop) of ``tokens``, in blocks from ``first_block`` on."""
    blocks = tuple(range(first_block, first_block + -(-stop // BLOCK)))
    return Chunk(sequence, tuple(tokens[start:stop]), start, blocks, samples, session)


class Driver:
    """Generates greedily, as simply as can be: ``lanes`` sequences, one chunk each a step."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.step = 0

    def run(self, *chunks: Chunk, copies: tuple[tuple[int, int], ...] = ()) -> dict[int, int]:
        """One step, alone in flight; sequence -> token."""
        self.submit(*chunks, copies=copies)
        return self.collect()

    def submit(self, *chunks: Chunk, copies: tuple[tuple[int, int], ...] = ()) -> None:
        self.step += 1
        self.executor.submit(StepPlan(self.step, chunks, copies))

    def collect(self) -> dict[int, int]:
        return {s.sequence: s.token for s in self.executor.collect(30.0).sampled}

    def generate(
        self, prompt: Sequence[int], count: int, *, cut: int, first_block: int = 0
    ) -> list[int]:
        """``count`` tokens after ``prompt``, which is computed in chunks of ``cut``."""
        tokens, done = list(prompt), 0
        while len(tokens) < len(prompt) + count:
            stop = min(done + cut, len(tokens))
            samples = (greedy(),) if stop == len(tokens) else ()
            sampled = self.run(chunk(tokens, done, stop, first_block=first_block, samples=samples))
            tokens += sampled.values()
            done = stop
        return tokens[len(prompt) :]

    def generate_interleaved(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """As ``generate``, one step in flight for each prompt: prompt i owns blocks from 8 i."""
        tokens = [list(prompt) for prompt in prompts]
        done = [0] * len(prompts)

        def submit(i: int) -> None:
            piece = chunk(
                tokens[i],
                done[i],
                len(tokens[i]),
                first_block=8 * i,
                sequence=i,
                samples=(greedy(),),
            )
            self.submit(piece)
            done[i] = len(tokens[i])

        for i in range(len(prompts)):
            submit(i)
        for turn in range(count):
            for i in range(len(prompts)):
                tokens[i].append(self.collect()[i])
                if turn + 1 < count:
                    submit(i)
        return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def transformers_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The reference: the whole sequence computed again for every token."""
    import torch

    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
