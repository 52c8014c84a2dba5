"""Bytes of KV of a token and of a sequence on every rank, and how much a room holds."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import msgspec

from ekiden.parallel.split import even_part, head_split
from ekiden.planner.geometry import Geometry
from ekiden.planner.layout import Layout, stages
from ekiden.planner.parts import AnyAttention, LatentAttention, LinearAttention
from ekiden.planner.precision import KV_BYTES

STATE_BYTES = 4
"""Of an element of a linear layer's state, which is kept in float32; its convolution has 2."""


class LayerKv(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of layer keeps on a rank."""

    token_bytes: int
    window: int
    """Tokens before a sequence stops growing here; 0: it never does."""
    state_bytes: int = 0
    """Of a sequence, whatever its length."""
    layers: int

    def sequence_bytes(self, length: int, chunk: int) -> int:
        """A window keeps what the first token of a chunk still sees, and the chunk."""
        kept = min(length, self.window + chunk) if self.window else length
        return self.layers * (kept * self.token_bytes + self.state_bytes)


class RankKv(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank keeps of sequences."""

    kinds: tuple[LayerKv, ...]

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers, windows left out of account."""
        return sum(kind.layers * kind.token_bytes for kind in self.kinds)

    def sequence_bytes(self, length: int, chunk: int = 0) -> int:
        """Of a sequence of ``length`` tokens that is computed ``chunk`` tokens at a time."""
        return sum(kind.sequence_bytes(length, chunk) for kind in self.kinds)

    def tokens(self, room: int, length: int, *, chunk: int = 0, block: int = 1) -> int:
        """Tokens of sequences of ``length`` that ``room`` bytes hold; whole blocks of each kind.

        0 where not even a block of every kind fits.
        """
        padded = -(-length // block) * block
        need = self.sequence_bytes(padded, chunk)
        return max(0, room) * padded // need // block * block if need else 0


def rank_kv(
    geometry: Geometry,
    layout: Layout,
    dtype: str = "bf16",
    *,
    scale_bytes: int = 0,
    balanced: bool = True,
) -> tuple[RankKv, ...]:
    """Of each rank, stage after stage. With CP a rank keeps a part of the tokens, not of a token.

    ``dtype`` is a key of ``KV_BYTES``; ``scale_bytes`` lie behind the key and behind the value of
    each token and head in a cache of single bytes.
    """
    scales = scale_bytes if KV_BYTES[dtype] == 1 else 0
    return _rank_kv(geometry, layout, KV_BYTES[dtype], scales, balanced)


@lru_cache(maxsize=512)
def _rank_kv(
    geometry: Geometry, layout: Layout, width: int, scales: int, balanced: bool
) -> tuple[RankKv, ...]:
    found: list[RankKv] = []
    for bounds in stages(geometry, layout.pp, balanced=balanced):
        group = [
            _rank(geometry, layout.tp, rank, bounds, width, scales) for rank in range(layout.tp)
        ]
        found += group * (layout.dp * layout.cp)
    return tuple(found)


def _rank(
    geometry: Geometry, tp: int, tp_rank: int, bounds: tuple[int, int], width: int, scales: int
) -> RankKv:
    kinds = Counter(layer.attention for layer in geometry.layers[slice(*bounds)])
    return RankKv(
        kinds=tuple(
            _layer(attention, tp, tp_rank, width, scales, count)
            for attention, count in kinds.items()
        )
    )


def _layer(
    attention: AnyAttention, tp: int, tp_rank: int, width: int, scales: int, layers: int
) -> LayerKv:
    if isinstance(attention, LinearAttention):
        state = _state(attention, even_part(attention.value_heads, tp, tp_rank))
        return LayerKv(token_bytes=0, window=0, state_bytes=state, layers=layers)
    if isinstance(attention, LatentAttention):  # One vector, which no number of ranks divides.
        token = (attention.kv_rank + attention.rope_dim) * width + scales
    else:
        heads = head_split(attention.heads, attention.kv_heads, tp)[tp_rank].num_kv
        token = 2 * heads * (attention.head_dim * width + scales)
    return LayerKv(token_bytes=token, window=attention.window, layers=layers)


def _state(attention: LinearAttention, value_heads: int) -> int:
    """One matrix a value head, and the inputs that the convolution still sees."""
    matrix = value_heads * attention.key_dim * attention.value_dim * STATE_BYTES
    channels = attention.channels * value_heads // attention.value_heads
    return matrix + 2 * channels * (attention.kernel - 1)
