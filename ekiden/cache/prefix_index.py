"""Which block holds which tokens: the prefix cache's index, and the keys it is asked with.

A key is the whole chained digest of a block (``ekiden.core.hashes``) together with the block's
tokens. A hit must match the digest, the tokens and the block before it, so a digest that
collides is a miss and never another prompt's KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ekiden.core.errors import InvariantBroken
from ekiden.core.hashes import granule_hashes, token_bytes

Parent = bytes | int
"""What comes before a block: the root digest, or the serial number of the entry before it."""


class BlockKey(NamedTuple):
    """The name of one whole block: its chained digest, and its tokens as little-endian u32."""

    digest: bytes
    tokens: bytes


class KeyChain:
    """The keys of the whole blocks of one growing list of tokens, each computed once."""

    def __init__(self, root: bytes, block_size: int, granule: int) -> None:
        self.root = root
        self.block_size = block_size
        self.granule = granule
        self.keys: list[BlockKey] = []

    def upto(self, tokens: Sequence[int], end: int) -> list[BlockKey]:
        """Keys of the whole blocks within ``tokens[:end]``."""
        whole = end // self.block_size
        while len(self.keys) < whole:
            self._append(tokens)
        return self.keys[:whole]

    def _append(self, tokens: Sequence[int]) -> None:
        start = len(self.keys) * self.block_size
        block = tokens[start : start + self.block_size]
        parent = self.keys[-1].digest if self.keys else None
        digest = granule_hashes(self.root, block, self.granule, parent=parent)[-1]
        self.keys.append(BlockKey(digest, token_bytes(block)))

    def branch(self, blocks: int) -> KeyChain:
        """A chain of its own that begins with the first ``blocks`` keys of this one."""
        chain = KeyChain(self.root, self.block_size, self.granule)
        chain.keys = self.keys[:blocks]
        return chain


class _Entry(NamedTuple):
    serial: int
    block: int
    parent: Parent
    key: BlockKey


class PrefixIndex:
    """Digest to block. One block a digest, one digest a block."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, root: bytes, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest indexed prefix of ``keys``."""
        blocks: list[int] = []
        parent: Parent = root
        for key in keys:
            entry = self._by_digest.get(key.digest)
            if entry is None or entry.parent != parent or entry.key != key:
                break
            blocks.append(entry.block)
            parent = entry.serial
        return blocks

    def serial(self, block: int) -> int:
        """The number by which ``block``, which is indexed, is the parent of the next one."""
        return self._by_block[block].serial

    def insert(self, block: int, key: BlockKey, parent: Parent) -> int | None:
        """Index ``block`` and return its serial.

        Where the same content is indexed already, that entry stays and its serial is returned.
        None: another content has this digest (a collision); nothing after it can be indexed.
        """
        entry = self._by_digest.get(key.digest)
        if entry is not None:
            same = entry.parent == parent and entry.key == key
            return entry.serial if same else None
        if block in self._by_block:
            raise InvariantBroken(f"block {block} is indexed already, under another key")
        self._serial += 1
        entry = _Entry(self._serial, block, parent, key)
        self._by_digest[key.digest] = self._by_block[block] = entry
        return entry.serial

    def remove(self, block: int) -> None:
        """Forget ``block``: its content is about to be overwritten."""
        del self._by_digest[self._by_block.pop(block).key.digest]
