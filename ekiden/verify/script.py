"""What every pair of the in-process grid is put through: prompts around every border.

``long`` passes a chunk and a segment. ``fork`` begins as ``long`` does and comes when that has
been adopted: decode holds the beginning, and only the rest may move.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ekiden.text.tokenizer import Tokenizer

from .layouts import Layout
from .prompts import prompt_stream

CHUNK_TOKENS = 64
"""Of a step of every in-process replica."""
LONG, SHARED, FORK = 150, 90, 120
"""Tokens of ``long``, of what ``fork`` shares with it, and of ``fork``."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts by name: their length, ``long`` or ``fork``."""

    prompts: dict[str, tuple[int, ...]]
    max_tokens: int
    """Generated for each: the hand-off token, and the others on decode."""

    def names(self, prefill: Layout, decode: Layout) -> list[str]:
        """The prompts of a pair, in the order in which they are put in; ``fork`` is last."""
        return ["long", *map(str, _lengths(prefill.block_size, decode.block_size)), "fork"]


def make_script(tokenizer: Tokenizer, block_sizes: Sequence[int], max_tokens: int) -> Script:
    """All prompts that pairs of these block sizes ask for."""
    lengths = sorted({n for a in block_sizes for b in block_sizes for n in _lengths(a, b)})
    prompts = {
        str(length): prompt_stream(tokenizer, number, length)
        for number, length in enumerate(lengths)
    }
    long = prompt_stream(tokenizer, len(lengths), LONG)
    rest = prompt_stream(tokenizer, len(lengths) + 1, FORK - SHARED)
    prompts |= {"long": long, "fork": long[:SHARED] + rest}
    return Script(prompts=prompts, max_tokens=max_tokens)


def _lengths(prefill: int, decode: int) -> list[int]:
    """1, each border and both sides of it, and an odd one of several blocks."""
    borders = {size + off for size in (prefill, decode) for off in (-1, 0, 1)}
    return sorted({1, *borders, 2 * max(prefill, decode) + 5})
