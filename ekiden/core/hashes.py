"""Block hashes: the name of a piece of KV, the same in every process.

A hash covers one **granule** of tokens and, through its parent, everything before it. It is
SHA-256 over tagged, length-prefixed fields, so that a salt can never pass for an adapter, and
the compared key is the whole digest, so that a collision cannot hand out another prompt's KV.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

GRANULE = 16
"""Tokens covered by one hash; a replica's block size is a multiple of it."""

SCHEME = "sha256/tagged-v1"
"""Compared when two parties first meet; change it whenever the bytes below change."""


def root_hash(model: str, *, adapter: str = "", salt: str = "") -> bytes:
    """The parent of every first granule of (model, adapter, tenant salt)."""
    digest = hashlib.sha256(SCHEME.encode())
    for tag, value in ((b"model", model), (b"adapter", adapter), (b"salt", salt)):
        data = value.encode()
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, whatever the machine."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def granule_hashes(
    root: bytes, tokens: Sequence[int], granule: int = GRANULE, *, parent: bytes | None = None
) -> list[bytes]:
    """One hash for each whole granule of ``tokens``, chained from ``parent`` or the root.

    A last, partial granule has no hash: its KV is never shared.
    """
    data = memoryview(token_bytes(tokens))
    width = granule * 4
    current = root if parent is None else parent
    hashes: list[bytes] = []
    for start in range(0, len(data) - width + 1, width):
        current = hashlib.sha256(b"block" + current + data[start : start + width]).digest()
        hashes.append(current)
    return hashes


def block_hashes(granules: Sequence[bytes], block_size: int, granule: int = GRANULE) -> list[bytes]:
    """The hashes of whole blocks: the hash of a block is that of its last granule.

    Raises:
        ValueError: ``block_size`` is not a multiple of ``granule``.
    """
    if block_size % granule:
        raise ValueError(f"block size {block_size} is not a multiple of the granule {granule}")
    step = block_size // granule
    return list(granules[step - 1 :: step])
