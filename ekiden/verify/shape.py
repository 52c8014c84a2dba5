"""The engine of each replica of a verification: what all share, and what its layout adds."""

from __future__ import annotations

import msgspec

from ekiden.cache.layout import DTYPE_BYTES
from ekiden.core.config import EngineConfig

from .layouts import Layout


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What all replicas of one verification share."""

    engine: EngineConfig
    cache_tokens: int
    """KV of one replica: every prompt of a cell at once, with room to spare."""

    def of(self, layout: Layout, role: str) -> EngineConfig:
        """A cache of floats holds those of the activations, so such a ``kv`` sets both."""
        return msgspec.structs.replace(
            self.engine,
            tensor_parallel_size=layout.tp,
            pipeline_parallel_size=layout.pp,
            block_size=layout.block_size,
            dtype=layout.kv if layout.kv in DTYPE_BYTES else self.engine.dtype,
            kv_cache_dtype=layout.kv or self.engine.kv_cache_dtype,
            num_gpu_blocks_override=self.cache_tokens // layout.block_size,
            prefill_only=role == "prefill",
        )
