"""Prompts of exact lengths around every border where a block, a segment or a chunk may end."""

from __future__ import annotations

from collections.abc import Sequence

from ekiden.text.tokenizer import Tokenizer

_TEXT = (
    "A relay race is run by several people, one after the other. In Japan the long relay is "
    "called ekiden, and the runners hand over a sash instead of a baton. The first of them ran "
    "from Kyoto to Tokyo in 1917, five hundred kilometres in three days. Every runner knows the "
    "same two fears: to arrive with nobody waiting, and to wait for somebody who never comes. "
    "What matters at the border is not how fast the sash was carried, but that the very same sash "
    "is carried on. Before the race the captain writes down who runs which part, how long it is "
    "and how steep, and who takes over when somebody falls. Here are seven numbers to remember: "
    "12, 305, 4, 77, 1000, 9 and 58. The mountain stage goes up 860 metres, and the strongest "
    "climber of the team gets it. On the way back down, legs matter more than lungs. "
)


def prompt_lengths(block_sizes: Sequence[int], count: int) -> list[int]:
    """``count`` lengths: every border first, then lengths spread up to 500 tokens."""
    b = max(block_sizes)
    borders = [size + off for size in sorted(set(block_sizes)) for off in (-1, 0, 1)]
    lengths = [1, *borders, 3 * b + 5, 500, 2, 2 * b, 2 * b + 1, 255, 256, 257, 4 * b - 1]
    spread = (7 + 61 * i % 400 for i in range(count))
    return list(dict.fromkeys([*lengths, *spread]))[:count]


def make_prompts(
    tokenizer: Tokenizer, block_sizes: Sequence[int], count: int
) -> list[tuple[int, ...]]:
    """Prompts of those lengths, none of which begins as another does."""
    lengths = prompt_lengths(block_sizes, count)
    return [prompt_stream(tokenizer, number, length) for number, length in enumerate(lengths)]


def prompt_stream(tokenizer: Tokenizer, number: int, length: int) -> tuple[int, ...]:
    """``length`` tokens; each ``number`` starts at another place of the text."""
    once = tokenizer.encode(_TEXT)
    start = (number * 17) % len(once)
    stream = once[start:] + once * (length // len(once) + 1)
    return tuple(stream[:length])
