"""Pure comparison of tokens and of KV. No engine, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ekiden.cache.layout import KvLayout

TIE = 1e-4
"""Two best logits closer than this are a tie: either token is right in fp32."""

Top = tuple[tuple[int, float], ...]
"""(token, logprob) of the most likely tokens of one position."""

BITS = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "int8": np.uint8,
    "fp8_e4m3": np.uint8,
}
"""By KV dtype: the unsigned integer of an element's size."""

Bits = npt.NDArray[np.unsignedinteger[npt.NBitBase]]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """What one process generates for a prompt, and by how much each token won."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    """Logit of the best token minus that of the second best, for each position."""
    tops: tuple[Top, ...] = ()
    """The most likely tokens of each position, where they were asked for."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """How far a replica of another split may be from the truth."""

    logprob: float
    """The logprobs of an answer may differ by so much on average."""
    tie: float = TIE
    """Two best logits closer than this are a tie."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first output position where tokens differ."""

    position: int
    expected: int | None
    got: int | None
    tie: bool


def first_difference(
    reference: Reference, got: Sequence[int], start: int = 0, tie: float = TIE
) -> Difference | None:
    """Where ``got`` (outputs from position ``start``) leaves the reference, or None."""
    expected = reference.tokens[start:]
    for offset in range(max(len(expected), len(got))):
        want = expected[offset] if offset < len(expected) else None
        have = got[offset] if offset < len(got) else None
        if want != have:
            position = start + offset
            close = want is not None and have is not None and reference.gaps[position] < tie
            return Difference(position=position, expected=want, got=have, tie=close)
    return None


def logprob_distances(reference: Reference, got: Sequence[Top], start: int = 0) -> list[float]:
    """By how much each logprob differs, over positions of the same history.

    ``got`` are outputs from position ``start``, up to the first that differs, it included. Tokens
    that only one side counts among the most likely are left out.
    """
    distances = []
    for mine, theirs in zip(reference.tops[start:], map(dict, got), strict=False):
        distances += [abs(logprob - theirs[token]) for token, logprob in mine if token in theirs]
    return distances


class KvDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first element of the KV that differs, in global coordinates."""

    layer: int
    head: int
    position: int
    part: str
    """``K`` or ``V``."""
    rank: int
    """The decode rank that holds it."""


def rank_bits(layout: KvLayout, rank: int, blocks: Sequence[bytes]) -> Bits:
    """One rank's blocks as bit patterns ``[layers, kv_heads, tokens, 2, row]``."""
    bits = np.frombuffer(b"".join(blocks), dtype=BITS[layout.dtype])
    return by_position(bits.reshape(len(blocks), *layout.block_shape(rank)))


def by_position(blocks: Bits) -> Bits:
    """Blocks ``[blocks, kv_heads, layers, 2, size, row]`` of one prompt as ``[layers, kv_heads,
    tokens, 2, row]``."""
    count, heads, layers, two, size, row = blocks.shape
    ordered: Bits = blocks.transpose(2, 1, 0, 4, 3, 5).reshape(
        layers, heads, count * size, two, row
    )
    return ordered


def whole_cache(layout: KvLayout, ranks: Mapping[int, Bits]) -> Bits:
    """All ranks' shares put together, ``[num_layers, num_kv_heads, tokens, 2, row]``.

    Where ranks hold the same head, the last one's counts.
    """
    tokens = min(bits.shape[2] for bits in ranks.values())
    whole = np.zeros(
        (layout.num_layers, layout.num_kv_heads, tokens, 2, layout.row_width),
        dtype=BITS[layout.dtype],
    )
    for rank, bits in ranks.items():
        r = layout.ranks[rank]
        whole[r.layer_start : r.layer_stop, r.head_start : r.head_stop] = bits[:, :, :tokens]
    return whole


def first_kv_difference(
    prefill: Bits, layout: KvLayout, decode: Mapping[int, Bits], tokens: int
) -> KvDifference | None:
    """The first differing element over every decode rank, replicas of a head included."""
    found: list[KvDifference] = []
    for rank, bits in sorted(decode.items()):
        r = layout.ranks[rank]
        source = prefill[r.layer_start : r.layer_stop, r.head_start : r.head_stop, :tokens]
        wrong = np.argwhere(source != bits[:, :, :tokens])
        if len(wrong):
            layer, head, position, part, _ = (int(value) for value in wrong[0])
            found.append(
                KvDifference(
                    layer=r.layer_start + layer,
                    head=r.head_start + head,
                    position=position,
                    part="KV"[part],
                    rank=rank,
                )
            )
    return min(found, key=lambda d: (d.layer, d.head, d.position), default=None)
