"""What a request, a token and a replica are, in every process.

Lengths are in tokens, times in seconds, sizes in bytes, unless a name says otherwise.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a choice ended. ``stop`` and ``length`` are OpenAI's; the others are failures."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a choice ends. Names follow OpenAI and vLLM.

    ``seed`` is always set: the gateway (or the decode service, for direct gRPC calls) draws
    one where the client gave none, so that every retry repeats the same text.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs. k: the chosen token's logprob and the k most likely ones."""
    n: int = 1


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position, from the raw logits (before any penalty)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


class PrefillCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill replica that may be asked, in order of preference."""

    replica_id: str
    address: str
    epoch: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as decode and prefill see it: token ids, never text."""

    request_id: str
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    """Tenant salt of the block hash: requests with different salts never share KV."""
    deadline_s: float = 600.0
    """Seconds from arrival after which the request is cancelled with an error."""
    priority: int = 0


class TokenSources(msgspec.Struct, frozen=True, kw_only=True):
    """Where every prompt token's KV came from. The four parts add up to the prompt."""

    decode_cache: int = 0
    prefill_cache: int = 0
    prefill_computed: int = 0
    local_computed: int = 0
    reason: str = ""
    """Why the prompt took this way, e.g. ``prefilled on p-1`` or ``local: no prefill replica``."""

    @property
    def total(self) -> int:
        return self.decode_cache + self.prefill_cache + self.prefill_computed + self.local_computed


class TimeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds spent in each phase, all read off the decode replica's clock; they add up."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    """What the request waited for after the hand-off token: the exposed part of the transfer."""
    first_decode_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.transfer_s + self.first_decode_s + self.decode_s


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one hand-off moved, and over which wire. ``seconds`` is first byte to last."""

    bytes: int = 0
    seconds: float = 0.0
    wire: str = ""
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    """What prefill took from decode's cache, instead of computing it, to go on from."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice. ``finish`` is set on the last delta of that choice."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice, None for EOS."""


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was served another way than asked, with the reason."""

    kind: str
    """``refused`` (the two replicas do not fit), ``prefill_retry``, ``local_prefill``,
    ``recompute`` or ``preempted``."""
    reason: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The account of a finished request; comes after the last delta of its last choice."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    sources: TokenSources
    times: TimeSplit
    transfer: TransferStats = TransferStats()
    fallbacks: tuple[Fallback, ...] = ()
    prefill_replica: str = ""
    decode_replica: str = ""


class KvWire(msgspec.Struct, frozen=True, kw_only=True):
    """What KV takes from a prefill replica, and how fast that was when the two met."""

    peer: str
    wire: str
    bytes_per_s: float
    """0: there was no room to measure."""


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's load at one moment, what the router predicts from."""

    running: int = 0
    waiting: int = 0
    receiving: int = 0
    """Of a decode replica: requests with blocks for KV that a prefill replica computes or sends."""
    waiting_tokens: int = 0
    """Prompt tokens not yet computed, of waiting and running requests."""
    kv_blocks_total: int = 0
    kv_blocks_held: int = 0
    kv_blocks_cached: int = 0
    prefill_tokens_per_s: float = 0.0
    """Measured over about the last 100 steps with prompts; 0 until the first prefill."""
    step_s: float = 0.0
    """Measured decode step, the mean of about the last 100; 0 until the first step."""
    step_rows: float = 0.0
    """The mean rows of those steps."""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    stage_idle: tuple[float, ...] = ()
    """For each pipeline stage, the share of the time with steps in flight in which it computed
    nothing: the bubble, and what lies between steps. Of about the last 100 steps."""
    collective_share: float = 0.0
    """Share of a step that its slowest rank was in collectives and stage links, likewise."""
    spec_proposed_tokens: int = 0
    """Since the start: tokens that speculation had the model check, and how many were right."""
    spec_accepted_tokens: int = 0
    wires: tuple[KvWire, ...] = ()
    """Of a decode replica: one for each prefill replica that it has met."""


class BlockBooks(msgspec.Struct, frozen=True, kw_only=True):
    """The block pool's books: ``free + cached + held == total`` always; on idle, held == 0."""

    total: int
    free: int
    cached: int
    held: int
    requests: int
    """Requests the engine still knows, in any state."""
    sessions: int = 0
    """Hand-off sessions still open or draining."""

    @property
    def balanced(self) -> bool:
        return self.free + self.cached + self.held == self.total

    @property
    def idle(self) -> bool:
        return self.balanced and self.held == 0 and self.requests == 0 and self.sessions == 0
