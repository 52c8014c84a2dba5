"""Configuration, resolved once and never changed. Field names follow vLLM's options."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ekiden.core.errors import SetupError
from ekiden.core.hashes import GRANULE

ON_LOAD = ("int8", "int4", "fp8")
"""What a checkpoint of floats can be quantised to while it is loaded."""
QUANTIZATIONS = ("auto", *ON_LOAD, "gptq", "awq", "compressed-tensors")
"""The last three, as vLLM names them, only check that the checkpoint is of that method."""
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3")
MAX_THREADS = 1024
"""Of a rank. Beyond what a system can start, torch ends the process without a word."""
MAX_SPECULATIVE_TOKENS = 64
MAX_PROMPT_LOOKUP = 64


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens proposed without a second model and checked by the model. Off by default."""

    method: str = "ngram"
    """The only one: what followed the last tokens before, in prompt and output."""
    num_speculative_tokens: int = 0
    """Proposed at most for one sequence and step; 0: no speculation."""
    prompt_lookup_max: int = 4
    """Length of the longest run of last tokens that is looked for."""
    prompt_lookup_min: int = 0
    """Length of the shortest; 0: 2, or ``prompt_lookup_max`` where that is less."""

    @property
    def shortest_lookup(self) -> int:
        return self.prompt_lookup_min or min(2, self.prompt_lookup_max)

    def __str__(self) -> str:
        """As ``--speculative-config`` reads it."""
        return msgspec.json.encode(self).decode() if self.num_speculative_tokens else "off"

    def check(self) -> SpeculativeConfig:
        """Return self, or raise SetupError naming the field, its value and the valid choices."""
        if self.method != "ngram":
            raise SetupError(
                f"--speculative-config: method {self.method!r} is unknown: only ngram is there"
            )
        for field, low, high in (
            ("num_speculative_tokens", 0, MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", 1, MAX_PROMPT_LOOKUP),
            ("prompt_lookup_min", 0, self.prompt_lookup_max),
        ):
            value = getattr(self, field)
            if not low <= value <= high:
                raise SetupError(f"--speculative-config: {field} is {value}: use {low} to {high}")
        return self


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica's engine is. ``resolve`` checks it; nothing changes it afterwards."""

    model_dir: Path
    model_name: str
    dtype: str = "auto"
    """Of weights and activations: float32, bfloat16 or float16; ``auto`` takes config.json's."""
    quantization: str = "auto"
    """``auto`` takes the checkpoint as it is; int8, int4 and fp8 quantise it while it is loaded."""
    kv_cache_dtype: str = "auto"
    """``auto`` takes ``dtype``; int8 and fp8 keep a scale with every row of a head."""
    device: str = "cpu"
    kernels: str = "auto"
    """``auto`` takes the fastest that the device and the machine can run; else its name."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    block_size: int = 16
    granule: int = GRANULE
    max_model_len: int = 0
    """0: what the model's config says."""
    num_gpu_blocks_override: int = 0
    """KV blocks, whatever the device; 0: from ``kv_cache_memory_bytes``."""
    kv_cache_memory_bytes: int = 0
    """For the whole replica, replicated heads not counted; 0: 1 GiB on CPU, and on CUDA what
    ``gpu_memory_utilization`` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of a card for weights, activations and KV together; not used on CPU."""
    max_num_batched_tokens: int = 512
    """Tokens of one step, prefill chunks and decode rows together."""
    max_num_seqs: int = 64
    enable_prefix_caching: bool = True
    speculative_config: SpeculativeConfig = SpeculativeConfig()
    async_scheduling: bool = True
    """Plan a step while the one before it runs; never with speculation."""
    prefill_only: bool = False
    """In a prefill pool: a request leaves with its first token, so stages are balanced for that."""
    shared_kv: bool = False
    """Keep the KV cache in memory that other processes of this host can map and read."""
    step_timeout_s: float = 120.0
    threads_per_rank: int = 0
    """0: the machine's cores divided by the ranks, at least 1."""
    core_sharing: bool = False
    """Take more threads than these while other ranks of this host that share too are idle."""

    def check(self) -> EngineConfig:
        """Return self, or raise SetupError naming the option, its value and the valid choices."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise SetupError(f"--{name.replace('_', '-')} must be at least 1")
        if self.block_size < 1 or self.block_size % self.granule:
            raise SetupError(
                f"--block-size {self.block_size} must be a multiple of the granule "
                f"({self.granule}): try {self.granule} or {2 * self.granule}"
            )
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise SetupError(
                f"--dtype {self.dtype} is unknown: choose auto, float32, bfloat16 or float16"
            )
        for option, value, choices in (
            ("--quantization", self.quantization, QUANTIZATIONS),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
        ):
            if value not in choices:
                raise SetupError(f"{option} {value} is unknown: choose {', '.join(choices)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SetupError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g} is not a share of the "
                "card: choose above 0 and up to 1"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SetupError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs ({self.max_num_seqs}), or a full batch could not decode"
            )
        if self.threads_per_rank > MAX_THREADS:
            raise SetupError(
                f"--threads-per-rank {self.threads_per_rank} is too many: choose 1 to "
                f"{MAX_THREADS}, or 0 for a share of the cores"
            )
        self.speculative_config.check()
        return self

    @property
    def plans_ahead(self) -> bool:
        """Whether a step may be planned whose rows go on from tokens still being sampled.

        With speculation nobody knows how many tokens those will be.
        """
        return self.async_scheduling and not self.speculative_config.num_speculative_tokens

    @property
    def steps_in_flight(self) -> int:
        """Steps that a replica has at once: one a stage, and one that is planned ahead."""
        return self.pipeline_parallel_size + self.plans_ahead


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill or decode replica as a network service."""

    role: str
    """``prefill`` or ``decode``."""
    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 0
    """0 draws a free port."""
    advertise: str = ""
    """HOST:PORT that peers dial; empty: host and port, if the host can be dialled."""
    redis_url: str = ""
    """Empty: register nowhere (a decode replica then prefills locally or as told)."""
    replica_id: str = ""
    kv_transport: str = "auto"
    """Wires that may carry KV, comma-separated; ``auto``: all that run here. Each pair of replicas
    measures those that both have when it first meets."""
    kv_rate_limit: int = 0
    """Bytes of KV that a rank moves in a second, at most; 0: no limit."""
    kv_shm_dir: str = ""
    """A folder that the containers of one host share, for the shm wire; empty: none is needed."""
    secret: str = ""
    """Shared by all services; empty: no authentication."""
    local_prefill_tokens: int = 64
    """Decode prefills at most this many uncached tokens itself rather than ask a prefill pool."""
    enable_kv_debug: bool = False
    """Let peers read cached KV (``Replica.ReadKv``); for ``ekiden verify`` only."""
    drain_grace_s: float = 30.0
    ready_file: str = ""
    """Written with the address once the replica serves; for supervisors and tests."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP gateway. ``models`` maps a served name to the directory of its tokenizer."""

    models: dict[str, Path]
    host: str = "127.0.0.1"
    port: int = 8000
    redis_url: str
    secret: str = ""
    api_key: str = ""
    """Clients must send it as a bearer token; empty: open."""
    max_body_bytes: int = 8 << 20
    request_timeout_s: float = 600.0
    drain_grace_s: float = 30.0
    ready_file: str = ""
