"""What one step has alive at once, by formula: bytes from plain numbers, no torch.

The engine asks it for the model that it serves, the planner for any other.
"""

from __future__ import annotations

from ekiden.parallel.split import even_part

COLLECTIVE_SLOT = 4 << 20
"""Most bytes of one rank's slot in the shared memory of a TP group; there are two a rank."""
GATHERED_TOKENS = 1 << 15
"""Most tokens whose keys and values attention in plain torch gathers at once."""


def layer_bytes(
    *, tokens: int, hidden: int, queries: int, qkv: int, inner: int, gathered: int, width: int
) -> int:
    """Of one layer. ``queries`` and ``qkv``: numbers of a token in a rank's queries, and in its
    queries, keys and values; ``inner``: those in its MLP; ``gathered``: bytes of the keys and
    values that attention gathers; ``width``: bytes of a number."""
    stream = 3 * tokens * hidden * width
    # Queries are rotated in float32: the product and both of its terms.
    attention = tokens * (qkv + 2 * queries) * width + 3 * tokens * queries * 4 + gathered
    return stream + max(attention, 4 * tokens * inner * width)


def logit_bytes(*, rows: int, vocab: int, tp: int, tp_rank: int) -> int:
    """The rank's own columns; on the sampler all of them, joined, adjusted and sorted."""
    part = rows * even_part(vocab, tp, tp_rank) * 4
    return part if tp_rank else part + 4 * rows * vocab * 4


def shared_bytes(*, step: int, tp: int, pp: int) -> int:
    """What a rank maps of the memory that ranks of a host share, once all of it has been used;
    ``step``: bytes of the hidden states of a step."""
    slots = 2 * tp * min(step, COLLECTIVE_SLOT) if tp > 1 else 0
    links = 4 * pp * step if pp > 1 else 0
    return slots + links
