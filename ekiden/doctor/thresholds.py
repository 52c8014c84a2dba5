"""Where doctor begins to speak, each with its reason. Shares are of one; times in seconds."""

from __future__ import annotations

ENOUGH_ANSWERS = 20
"""A P95 of fewer is one answer."""
ENOUGH_READINGS = 8
"""Of a replica, one a second: it renews what it says of itself so often."""

COMMUNICATION = 0.3
"""Of a step. Two all-reduces a layer take a tenth to a fifth of a decode step on a link made for
it; beyond this the link, or the ranks' wait for one another, is what the step is about."""

SLOWER = 1.1
"""Times are compared between two runs: repeats differ by some per cent."""

JITTER = 2.5
"""P95 of TPOT over its median."""
FELT_S = 0.02
"""Between tokens: a difference that is shorter is not seen by a reader."""

UNEVEN_STAGES = 0.25
"""Between the idle shares of two stages. Layers are dealt whole, so some difference is normal."""
BUBBLE = 0.4
"""Idle share of the least idle stage. One request in flight over two stages leaves half; with more
requests than stages no stage should wait so long."""

KV_FULL = 0.9
"""Of a replica's blocks. Where its size is told, it is also full when one more prompt of the mean
length does not fit."""

SCALING = 0.7
"""Of the throughput that so many replicas promise. Balance and luck cost a tenth or two."""

UNEVEN_LOAD = 0.5
"""Between two replicas of a pool: the idler has less than half of the other's requests, which has
some waiting."""
IMBALANCE = 1.5
"""Tokens of the busiest replica over the mean."""

HOT_RANK = 1.5
"""Tokens of the busiest rank over the mean of those that hold experts. The planner takes 1.25 for
granted."""
HOT_EXPERT = 2.0
ENOUGH_TOKENS = 20
"""Tokens of the hottest expert over the mean, once a mean one has had so many: by chance alone the
hottest of some hundred has less than twice as many."""
DISPATCH = 0.25
"""Of a step in dispatch and combine, the wait for the busiest rank included."""
TAIL = 2.5
"""P99 of TPOT over its median, where nothing else shows that the ranks wait. An answer's TPOT is a
mean over its steps: single steps differ by more."""
SWING = 1.2
"""Between the busiest rank at P95 and at P50."""
ENOUGH_STEPS = 100

SMALL_BATCH = 16
"""Sequences: a decode step reads all weights for one as for many, so below this a larger batch is
nearly free."""
STARVED = 0.5
"""Share of the requests that the gateway has and no replica knows of; share of the time that a
replica with work computes nothing."""
CLIENT_CPU = 0.8
CLIENT_LAG_S = 0.01
"""As ``ekiden bench`` warns."""

CROWDED = 1.5
"""Processes that want a core, a core."""
BUSY = 0.8
"""Share of the time that a stage computes."""

QUEUE_SHARE = 0.5
QUEUE_S = 0.25
"""Of the time to the first token, and at least so long: a quarter of a second is felt."""
STUCK_S = 5.0
"""Without an answer, with requests in flight."""
PREFIX_MISS = 0.2
"""Of the prompt tokens: expected in a cache, and not found there."""

SAME_TOKENS = 0.9
"""Of the greedy tokens, INT8 keeps 98 %, FP8 94 % and INT4 80 % (docs/quantisation.md)."""
ENOUGH_PROMPTS = 32

EXPOSED_TRANSFER = 0.3
"""Of the time until decode goes on with a request: KV moves while the next chunk computes, so most
of a transfer should be hidden."""
EXPOSED_S = 0.01
SHORT_PROMPT = 256
"""Tokens: below it a hand-off costs more than the prefill that it takes away."""
QUEUED = 2.0
"""Requests waiting for each replica of one pool while the other pool has no queue."""
WIRE_USE = 0.7
"""Of what a wire did when it was measured alone."""

MANY_FAILED = 0.01
"""Of the requests: from there on it is no accident."""
