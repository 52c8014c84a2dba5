"""How a replica's KV is laid out over its ranks and inside a block. No torch.

A rank's cache is one tensor ``[blocks, kv_heads, layers, 2, block_size, row]`` over its own
heads and layers (index 0 of the axis of length 2 is K, index 1 is V). Heads come outermost inside
a block, so a change of TP between prefill and decode moves long contiguous runs.

A row is the ``head_dim`` numbers of one token and head. In a quantised cache these are bytes, and
the float32 scale that they are multiplied by lies behind them in the same row: it is in the block
that it belongs to, and goes wherever that goes.
"""

from __future__ import annotations

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of weights and activations; KV may have these too."""
KV_BYTES = {**DTYPE_BYTES, "int8": 1, "fp8_e4m3": 1}
"""Of one element of a KV cache."""
SCALE_BYTES = 4
"""Of the float32 behind a quantised row; aligned, since ``head_dim`` is a multiple of it."""


def is_scaled(dtype: str) -> bool:
    """Whether rows of a KV dtype are bytes with a scale behind them."""
    return KV_BYTES[dtype] == 1


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds: global KV heads [head_start, head_stop), layers likewise.

    When TP passes the KV heads, several ranks name the same heads: they are replicas.
    """

    tp_rank: int
    pp_rank: int
    head_start: int
    head_stop: int
    layer_start: int
    layer_stop: int

    @property
    def num_heads(self) -> int:
        return self.head_stop - self.head_start

    @property
    def num_layers(self) -> int:
        return self.layer_stop - self.layer_start


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of KV of one replica. ``ranks`` is in order pp_rank * tp + tp_rank."""

    kind: str = "attention"
    dtype: str
    """A key of ``KV_BYTES``."""
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp: int
    pp: int
    ranks: tuple[RankLayout, ...]

    @property
    def row_width(self) -> int:
        """Elements of one token's key (or value) of one head, the scale's bytes counted."""
        return self.head_dim + (SCALE_BYTES if is_scaled(self.dtype) else 0)

    @property
    def row_bytes(self) -> int:
        return self.row_width * KV_BYTES[self.dtype]

    def block_shape(self, rank: int) -> tuple[int, int, int, int, int]:
        """(kv_heads, layers, 2, block_size, row_width) of one block on ``rank``."""
        r = self.ranks[rank]
        return (r.num_heads, r.num_layers, 2, self.block_size, self.row_width)

    def block_bytes(self, rank: int) -> int:
        heads, layers, two, size, _ = self.block_shape(rank)
        return heads * layers * two * size * self.row_bytes

    def token_bytes(self) -> int:
        """Bytes of one token's KV over the whole model, replicas not counted."""
        return self.num_layers * self.num_kv_heads * 2 * self.row_bytes
