"""Tiny random checkpoints of every family, and our model run beside transformers' own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ekiden.cache.tensors import allocate_cache
from ekiden.core.config import EngineConfig
from ekiden.layers.batch import ForwardBatch, Span
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout
from ekiden.models.registry import Model, load_model
from ekiden.parallel.local import local_meshes
from ekiden.parallel.mesh import Mesh

VOCAB = 101
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 16, "num_key_value_heads": 4, "query_pre_attn_scalar": 24}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama3": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        LlamaConfig,
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 72,
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-yarn": (Qwen3Config, {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    "gemma2": (Gemma2Config, {**GEMMA, "sliding_window": 7, "attn_logit_softcapping": 2.0}),
    "gemma2-uncapped": (
        Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (Gemma3TextConfig, {**GEMMA, "sliding_window": 7, "num_hidden_layers": 7}),
    "gemma3-linear": (
        Gemma3TextConfig,
        {
            **GEMMA,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "phi3": (Phi3Config, {"pad_token_id": 0, "sliding_window": 7}),
    "phi4-mini": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "head_dim": 8,
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi3-long": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 4},
            "original_max_position_embeddings": 4,
        },
    ),
    "phi3-short": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "rope_parameters": {
                **LONG_ROPE,
                "factor": 8.0,
                "original_max_position_embeddings": 512,
            },
            "original_max_position_embeddings": 512,
        },
    ),
    "olmo2": (Olmo2Config, {"pad_token_id": 0}),
    "linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}},
    ),
}


def make_checkpoint(path: Path, family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a random checkpoint of ``family`` and return transformers' model of it, fp32."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = kind(**{**BASE, **settings, **changes})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # transformers starts these at 1 and 0
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return model.eval()


class Replica:
    """Our model over ``tp * pp`` threads, each with its own cache, fed step by step."""

    def __init__(
        self,
        path: Path,
        tp: int = 1,
        pp: int = 1,
        block_size: int = 16,
        dtype: str = "auto",
        kernels: str = "auto",
        **options: Any,
    ) -> None:
        """``options`` are fields of the engine's configuration."""
        self.config = EngineConfig(
            model_dir=path,
            model_name="tiny",
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            block_size=block_size,
            dtype=dtype,
            kernels=kernels,
            **options,
        ).check()
        self.model = ModelConfig.from_dir(path)
        layout = kv_layout(self.model, self.config)
        self.meshes = local_meshes(tp, pp, timeout_s=20.0)
        self.caches = [allocate_cache(layout, rank, 64) for rank in range(tp * pp)]
        with ThreadPoolExecutor(tp * pp) as pool:
            self.ranks = list(pool.map(self._load, self.meshes))

    def _load(self, mesh: Mesh) -> Model:
        return load_model(self.model, self.config, mesh, "cpu")

    def step(self, spans: list[Span]) -> Tensor:
        """Logits [R, V] of one step; checks that only the sampler's rank has them."""

        def work(rank: int) -> Tensor | None:
            batch = ForwardBatch.build(spans, self.config.block_size)
            return self.ranks[rank].forward(batch, self.caches[rank])

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            results = list(pool.map(work, range(len(self.ranks))))
        for mesh, result in zip(self.meshes, results, strict=True):
            assert (result is not None) == mesh.is_sampler
        return next(result for result in results if result is not None)


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[len(tokens), V] by transformers, one whole forward pass."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def worst_error(replica: Replica, reference: PreTrainedModel) -> float:
    """Largest logit difference over chunked prefill and decode of three mixed sequences."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate((37, 5, 18))]
    blocks = [[9, 3, 30, 12], [1, 7], [22, 5, 6]]
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    worst = 0.0
    # Chunk ends of each sequence: chunks of odd sizes, then one token at a time, all mixed.
    ends = [(20, 34, 35, 36, 37), (3, 4, 5), (17, 18)]
    for step in range(5):
        spans, wanted = [], []
        for s, stops in enumerate(ends):
            if step >= len(stops):
                continue
            start, stop = stops[step - 1] if step else 0, stops[step]
            spans.append(Span(prompts[s][start:stop], start, blocks[s], 1))
            wanted.append(expected[s][stop - 1])
        worst = max(worst, (replica.step(spans) - torch.stack(wanted)).abs().max().item())
    return worst
