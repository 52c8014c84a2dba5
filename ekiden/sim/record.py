"""What is known of a simulated request once it has ended; moments in seconds of the simulation."""

from __future__ import annotations

import msgspec

from ekiden.sim.asked import Asked

OK = ""
DISCONNECTED, UNAVAILABLE, TIMEOUT = "disconnected", "http_503", "timeout"
"""How a request fails, in the words of ``ekiden bench``: its stream broke, no replica was left, or
its deadline passed."""


class Record(msgspec.Struct, kw_only=True):
    """Filled in while the request lives."""

    asked: Asked
    started_s: float | None = None
    """Its first chunk was in a step."""
    first_s: float | None = None
    ready_s: float | None = None
    """The replica that decodes had all KV."""
    ended_s: float | None = None
    error: str = OK
    prefill_replica: str = ""
    decode_replica: str = ""
    decode_cache: int = 0
    """Prompt tokens by the place that their KV came from; the four add up to the prompt."""
    prefill_cache: int = 0
    prefill_computed: int = 0
    local_computed: int = 0
    moved_bytes: int = 0
    predicted_cached: int = 0
    preemptions: int = 0
    fallbacks: list[str] = []

    @property
    def index(self) -> int:
        return self.asked.number

    @property
    def scheduled_s(self) -> float:
        return self.asked.due_s

    @property
    def sent_s(self) -> float:
        """Nothing holds a request back."""
        return self.asked.due_s

    @property
    def prompt_tokens(self) -> int:
        """Of an answer that came, as ``output_tokens``."""
        return self.asked.prompt if self.ok else 0

    @property
    def output_tokens(self) -> int:
        return self.asked.output if self.ok else 0

    @property
    def ok(self) -> bool:
        return self.ended_s is not None and self.error == OK

    @property
    def ttft_s(self) -> float:
        """From the moment at which it was due. Of a request that has a first token."""
        assert self.first_s is not None
        return self.first_s - self.asked.due_s

    @property
    def e2e_s(self) -> float:
        assert self.ended_s is not None
        return self.ended_s - self.asked.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None of an answer of one token."""
        if self.ended_s is None or self.first_s is None or self.asked.output < 2:
            return None
        return (self.ended_s - self.first_s) / (self.asked.output - 1)
