"""What the scheduler tells the ranks to do in one step, and what comes back. No torch.

These structs cross from the driver to the rank processes as msgpack over a local pipe.
"""

from __future__ import annotations

import msgspec

from ekiden.core.types import TokenLogprobs

UNKNOWN = 0
"""Stands where a token will be that is still being sampled."""


class SampleSpec(msgspec.Struct, frozen=True, array_like=True):
    """One token to sample from the logits of one position of a chunk.

    ``seed`` is already the choice's own. ``position`` counts the output tokens before this one,
    so that a resumed request draws what it would have drawn.
    """

    choice: int
    seed: int
    position: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    banned: tuple[int, ...]
    """Tokens that may not be chosen at this position (EOS and stop ids before min_tokens)."""
    seen: bytes
    """Distinct tokens that a penalty is for, as u32; empty without penalties. Those of the output,
    with ``repetition_penalty`` those of the prompt too (``ekiden.engine.history``)."""
    seen_counts: bytes
    """How often each of ``seen`` is in the output, as u32."""
    logprobs: int | None


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's tokens of one step: positions [start, start + len(tokens))."""

    sequence: int
    """The driver's number for the sequence; comes back with what was sampled."""
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    """Block table covering positions [0, start + len(tokens))."""
    samples: tuple[SampleSpec, ...] = ()
    """Empty unless this chunk reaches the last known token; n entries for n choices."""
    session: int = 0
    """Hand-off session that wants this chunk's KV, 0 for none."""
    proposed: int = 0
    """So many of the last tokens are proposals of what follows the last known one. Then there is
    one choice, and ``samples`` are for the last ``proposed`` + 1 positions, in order."""
    after: int = 0
    """0, or the step that samples this chunk's one token, which was in flight when this one was
    planned. UNKNOWN stands in its place, and ``seen`` of ``samples`` lacks it."""

    @property
    def logit_rows(self) -> int:
        """Last positions whose logits are wanted."""
        return self.proposed + 1 if self.samples else 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. ``copies`` (source, target) blocks are copied before anything is computed."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token. Those of one choice come in order of position."""

    sequence: int
    choice: int
    token: int
    logprobs: TokenLogprobs | None = None


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled. ``compute_s`` is the slowest rank's time, collectives included."""

    step: int
    sampled: tuple[Sampled, ...]
    compute_s: float = 0.0
    collective_s: float = 0.0
    collective_bytes: int = 0
    idle_s: float = 0.0
    """Seconds the last stage waited for its input inside the step."""
    stage_s: tuple[float, ...] = ()
    """Seconds each stage computed, its slowest rank's; what is left of the time is its bubble."""
