"""Prompts made of a trace's block ids, with the keys by which the prefix index knows them.

Equal ids become equal tokens, hashed as the engine hashes any prompt; so what hits, and what does
not, is found out by the real index. Blocks of ids that many prompts have are hashed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from ekiden.cache.prefix_index import BlockKey, KeyChain
from ekiden.core.errors import SetupError
from ekiden.core.hashes import granule_hashes, root_hash, token_bytes
from ekiden.planner.trace import BLOCK
from ekiden.sim.asked import Asked

_DIGITS, _BASE = 4, 256
"""An id is written into the first tokens of its block. Numbers below 257 are one object each in
CPython, so a prompt takes a pointer a token."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request's prompt, and the keys of its whole blocks."""

    tokens: list[int]
    keys: list[BlockKey]

    @property
    def granules(self) -> list[bytes]:
        """What the gateway knows it by."""
        return [key.digest for key in self.keys]


class Prompts:
    """Makes prompts for blocks of ``block_size`` tokens, a divisor of ``BLOCK``."""

    def __init__(self, model: str, block_size: int, asked: Iterable[Asked]) -> None:
        """``asked``: all that there will be, to know which ids come again.

        Raises:
            SetupError: the block size does not divide the trace's.
        """
        if block_size < 1 or BLOCK % block_size:
            sizes = ", ".join(str(1 << power) for power in range(4, 10))
            raise SetupError(
                f"block size {block_size} does not divide the {BLOCK} tokens of a trace's block: "
                f"choose one of {sizes}"
            )
        self.root = root_hash(model)
        self.block_size = block_size
        self._times = Counter(id for one in asked for id in one.ids)
        self._runs: dict[tuple[bytes, int], list[BlockKey]] = {}
        self._bytes: dict[bytes, bytes] = {}

    def of(self, asked: Asked) -> Prompt:
        tokens: list[int] = []
        keys: list[BlockKey] = []
        for id in asked.ids:
            block = _tokens(id)[: asked.prompt - len(tokens)]
            parent = keys[-1].digest if keys else self.root
            tokens += block
            keys += self._keys(parent, id, block)
        if (own := asked.prompt - len(tokens)) > 0:
            tokens += _own(asked.number, own)
        return Prompt(tokens=tokens, keys=self._rest(tokens, keys))

    def chain(self, prompt: Prompt) -> KeyChain:
        """The keys of a sequence that begins with ``prompt``."""
        chain = KeyChain(self.root, self.block_size, self.block_size)
        chain.keys = prompt.keys.copy()
        return chain

    def _keys(self, parent: bytes, id: int, block: Sequence[int]) -> list[BlockKey]:
        again = self._times[id] > 1 and len(block) == BLOCK
        if again and (known := self._runs.get((parent, id))) is not None:
            return known
        found = self._hashed(parent, block)
        if again:
            self._runs[parent, id] = found
        return found

    def _hashed(self, parent: bytes, tokens: Sequence[int]) -> list[BlockKey]:
        size, width = self.block_size, 4 * self.block_size
        digests = granule_hashes(self.root, tokens, size, parent=parent)
        data = token_bytes(tokens)
        parts = [data[i * width : (i + 1) * width] for i in range(len(digests))]
        same = self._bytes.setdefault
        return [BlockKey(*pair) for pair in zip(digests, (same(p, p) for p in parts), strict=True)]

    def _rest(self, tokens: list[int], keys: list[BlockKey]) -> list[BlockKey]:
        """All keys, those of the tokens that no id covers among them."""
        known = len(keys) * self.block_size
        if len(tokens) - known < self.block_size:
            return keys
        parent = keys[-1].digest if keys else self.root
        return keys + self._hashed(parent, tokens[known:])


@lru_cache(1 << 14)
def _tokens(id: int) -> tuple[int, ...]:
    return (*_digits(id), *(0,) * (BLOCK - _DIGITS))


def _own(number: int, length: int) -> list[int]:
    """Tokens of one request alone: no block of an id begins so."""
    return [_BASE, *_digits(number), *(0,) * length][:length]


def _digits(number: int) -> tuple[int, ...]:
    return tuple(number // _BASE**place % _BASE for place in range(_DIGITS))
