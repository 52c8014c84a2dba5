"""What is known of a request once it has ended, however it ended."""

from __future__ import annotations

import msgspec

OK = ""
ERRORS = {
    "connect": "no connection",
    "timeout": "not ended within the deadline of a request",
    "disconnected": "the server hung up before the end",
    "malformed": "what came is not HTTP with server-sent events of JSON",
    "stream_error": "an error event in the stream",
    "empty": "an end without a token",
}
"""Kinds of failure; an HTTP status other than 200 is a kind of its own, as ``http_429``."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The ``ekiden`` part of our gateway's usage: where tokens came from, where time went."""

    sources: dict[str, int] = {}
    """Prompt tokens by the place that their KV came from."""
    times: dict[str, float] = {}
    """Seconds of each phase."""
    prefill_replica: str = ""
    decode_replica: str = ""
    wire: str = ""
    moved_bytes: int = 0
    fallbacks: tuple[str, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record", omit_defaults=True):
    """One request. Moments are seconds from the start of its phase."""

    index: int
    asked_prompt: int
    asked_output: int
    scheduled_s: float
    """When it was due: by the schedule of an open loop; when its turn came in a closed one."""
    sent_s: float
    """Before the connection is taken, so that connecting counts."""
    ended_s: float
    """The last event that belongs to a choice; where it failed, the failure."""
    first_s: float | None = None
    """The first event with text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    """The server told both; else output tokens are the events with text."""
    itl_mean_s: float = 0.0
    itl_std_s: float = 0.0
    itl_max_s: float = 0.0
    error: str = OK
    detail: str = ""
    account: Account | None = None

    @property
    def ok(self) -> bool:
        return self.error == OK

    @property
    def lag_s(self) -> float:
        """By how much it was sent late: of the client, or of its limit on requests in flight."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float:
        """From the scheduled moment to the first token."""
        return (self.ended_s if self.first_s is None else self.first_s) - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None of an answer of one token."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.ended_s - self.first_s) / (self.output_tokens - 1)
