"""Context parallelism: how long groups that share a prompt wait for one another's part of it.

Each group computes two stretches of a step's tokens, one from either end, so that causal work is
even. Ring attention (arXiv:2310.01889) passes keys and values round while a group computes with
those it has; arXiv:2411.01783 passes queries instead where a long context is kept already.
"""

from __future__ import annotations

import msgspec

from ekiden.planner.work import Scores


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """``groups`` and what joins them."""

    groups: int
    latency: float
    """Seconds of a message of no bytes to the next group."""
    rate: float
    """Bytes/s of a rank to that of its place in the next group."""
    score_rate: float
    """Operations/s of attention."""

    def waits(self, scores: Scores, tokens: float, seen: float) -> float:
        """Seconds that one layer of a kind adds to a step of ``tokens``, which see ``seen`` others
        each on average: by the cheaper of passing KV and passing queries.

        What arrives while a group computes with a part is hidden behind that; what queries found
        goes back to their group at the end, and nothing hides it.
        """
        own = tokens / self.groups
        kept = max(tokens, seen + tokens / 2)
        if scores.window:
            kept = min(kept, scores.window + tokens)
        computing = own * scores.prefill * scores.seen(seen) / self.score_rate / self.groups
        keys = max(0.0, kept / self.groups * scores.kv_bytes / self.rate - computing)
        queries = max(0.0, own * scores.query_bytes / self.rate - computing)
        queries += self.latency + own * scores.partial_bytes / self.rate
        return (self.groups - 1) * (self.latency + min(keys, queries))
