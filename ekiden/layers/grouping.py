"""Which sequences attention computes together, worked out once a step for all layers.

A prefill chunk goes alone, over exactly its own keys. Decode rows of similar length go
together, padded to the longest; what the padding reads is masked, and its values are zeroed,
since a block may hold anything (even NaN) beyond its sequence's end.

Shapes: G sequences of a group, Q query tokens of each, M blocks of the longest, B block size,
L keys (the longest sequence's length).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_GROUP_TOKENS = 8192
"""Keys gathered at once, padding included: bounds the scratch memory and keeps it in cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionGroup:
    """Sequences with the same number of query tokens."""

    rows: Tensor | slice
    """Rows of T, G * Q of them, sequence by sequence."""
    query_len: int
    table_GM: Tensor
    """int64 block ids; rows of shorter sequences are filled up with any block."""
    length: int
    causal: bool
    """The queries are the whole sequence: plain causal attention, no ``visible_GQL``."""
    visible_GQL: Tensor | None
    """bool; None where every query sees every key (or ``causal`` says which)."""
    beyond_GL: Tensor | None
    """bool, True past a sequence's end; None where no sequence is shorter than ``length``."""


def group_sequences(
    query_starts: Sequence[int],
    kv_lengths: Sequence[int],
    tables_SM: Tensor,
    block_size: int,
    window: int,
) -> list[AttentionGroup]:
    """Cover every row of T exactly once. ``window`` is 0, or the last positions a token sees."""
    groups: list[AttentionGroup] = []
    decode: list[int] = []
    for s, length in enumerate(kv_lengths):
        first, last = query_starts[s], query_starts[s + 1]
        if last - first == 1:
            decode.append(s)
        else:
            rows = slice(first, last)
            groups.append(
                _group(rows, last - first, [length], tables_SM[s : s + 1], block_size, window)
            )
    for members in _similar(decode, kv_lengths):
        rows_R = torch.tensor([query_starts[s] for s in members], device=tables_SM.device)
        lengths = [kv_lengths[s] for s in members]
        groups.append(_group(rows_R, 1, lengths, tables_SM[members], block_size, window))
    return groups


def _similar(sequences: Sequence[int], kv_lengths: Sequence[int]) -> list[list[int]]:
    """Runs of sequences by falling length: none under half of its run's first, none too big."""
    runs: list[list[int]] = []
    for s in sorted(sequences, key=lambda s: -kv_lengths[s]):
        longest = kv_lengths[runs[-1][0]] if runs else 0
        fits = runs and (len(runs[-1]) + 1) * longest <= MAX_GROUP_TOKENS
        if fits and 2 * kv_lengths[s] >= longest:
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs


def _group(
    rows: Tensor | slice,
    query_len: int,
    lengths: Sequence[int],
    tables_GM: Tensor,
    block_size: int,
    window: int,
) -> AttentionGroup:
    longest, device = max(lengths), tables_GM.device
    keys_L = torch.arange(longest, device=device)
    ends_G1 = torch.tensor(lengths, device=device)[:, None]
    ragged = min(lengths) < longest
    causal = query_len == longest and not 0 < window < longest
    return AttentionGroup(
        rows=rows,
        query_len=query_len,
        table_GM=tables_GM[:, : -(-longest // block_size)],
        length=longest,
        causal=causal,
        visible_GQL=None if causal else _visible(keys_L, ends_G1, query_len, window, ragged),
        beyond_GL=keys_L >= ends_G1 if ragged else None,
    )


def _visible(
    keys_L: Tensor, ends_G1: Tensor, query_len: int, window: int, ragged: bool
) -> Tensor | None:
    """Key j is seen from position p if j <= p, and p - j < window where there is one."""
    if query_len == 1 and not ragged and not 0 < window < len(keys_L):
        return None
    back_Q = torch.arange(query_len - 1, -1, -1, device=keys_L.device)
    positions_GQ1 = (ends_G1 - 1 - back_Q)[:, :, None]
    visible_GQL = keys_L <= positions_GQ1
    if window > 0:
        visible_GQL &= positions_GQ1 - keys_L < window
    return visible_GQL
