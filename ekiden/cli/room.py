"""Whether this host has room for a whole deployment, told before anything is started.

A bound from below, from the headers of the checkpoint and without torch: what it refuses cannot
work. Each replica foretells its memory to the byte when it starts (``ekiden.engine.admission``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ekiden.cli.deployment import Pool
from ekiden.core.config import EngineConfig
from ekiden.core.errors import SetupError
from ekiden.engine.capacity import kv_memory, resolve_num_blocks
from ekiden.engine.host_memory import available_bytes
from ekiden.engine.memory import least_bytes, show
from ekiden.models.checkpoint import Checkpoint
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout

_WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Bytes of a number in the forms that weights are held in."""
_FLOATS = ("F64", "F32", "BF16", "F16")


def check_room(
    pools: Sequence[Pool],
    config: EngineConfig,
    available: Callable[[], int | None] = available_bytes,
) -> None:
    """``config`` is of every replica; pools set its split. Says nothing of CUDA devices.

    Raises:
        SetupError: all replicas together cannot fit; the message has the sum.
    """
    room = available()
    if config.device != "cpu" or room is None:
        return
    needs = [(pool, replica_bytes(pool, config)) for pool in pools if pool.size]
    total = sum(pool.size * need for pool, need in needs)
    if total <= room:
        return
    terms = " + ".join(f"{pool.role} {pool.size} x {show(need)}" for pool, need in needs)
    raise SetupError(
        f"these replicas do not fit on this host together: {terms} = {show(total)} at least, and "
        f"{show(room)} are available: lower --prefill, --decode or --kv-cache-memory (each replica "
        f"has {show(kv_memory(config))} of KV), or choose a smaller model"
    )


def replica_bytes(pool: Pool, config: EngineConfig) -> int:
    """What one replica of ``pool`` takes of a host without cards, at least."""
    model = ModelConfig.from_dir(config.model_dir)
    weights = _weights(model, config)
    split = msgspec.structs.replace(
        config,
        tensor_parallel_size=pool.tp,
        pipeline_parallel_size=pool.pp,
        prefill_only=pool.role == "prefill",
    )
    layout = kv_layout(model, split)
    return least_bytes(model, split, layout, resolve_num_blocks(model, split, layout), weights)


def _weights(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of the checkpoint's weights as they will be held, at least; each counted once."""
    plain = model.quantization is None
    form = config.quantization if plain and config.quantization in _WIDTHS else None
    width = _WIDTHS[form or model.resolve_dtype(config)]
    tensors = Checkpoint.open(config.model_dir).tensors.values()
    return sum(
        int(math.prod(info.shape) * width)
        if plain and info.dtype in _FLOATS
        else info.stop - info.start
        for info in tensors
    )
