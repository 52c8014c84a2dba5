"""The rules of the scheduler as pure functions, so that a simulator can share them."""

from __future__ import annotations

READY_AHEAD = 4
"""Hand-offs told to get ready before their turn, so that the answer's round trip hides."""

READY_STEPS = 2
"""More of them where they are short: this many steps' worth of tokens."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` positions."""
    return -(-tokens // block_size)


def rows_per_step(decoding: int, micro_batches: int) -> int:
    """Decode rows of one step when ``decoding`` sequences share ``micro_batches`` steps in flight.

    A pipeline stays busy only if each of its stages has rows of its own.
    """
    return -(-decoding // micro_batches)


def growth_allowance(preemptions: int, growth_left: int) -> int:
    """Blocks left free for one sequence's growth when a request is admitted beside it.

    One is enough for a request that was never preempted. It doubles with every preemption of the
    request to be admitted, up to all that can still be needed: a request cannot be admitted and
    preempted over and over, since in the end it waits until nothing can push it out again.
    """
    return min(1 << min(preemptions, 32), growth_left)


def enough_ahead(count: int, tokens: int, tokens_per_step: int) -> bool:
    """Whether ``count`` hand-offs of ``tokens`` in all, told to get ready, keep prefill busy."""
    return count >= READY_AHEAD and tokens >= READY_STEPS * tokens_per_step
