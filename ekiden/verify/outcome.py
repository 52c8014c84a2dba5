"""What became of a cell."""

from __future__ import annotations

import msgspec

STATUSES = ("equal", "refused", "differs", "hung", "failed")


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one cell, and how much it proves."""

    status: str = "equal"
    """One of ``STATUSES``."""
    detail: str = ""
    prompts: int = 0
    tokens: int = 0
    """Tokens that the truth has for these prompts."""
    equal_tokens: int = 0
    """Of these, so many were generated."""
    ties: int = 0
    kv_bytes: int = 0
    kv_tokens_compared: int = 0
    logprob: float = 0.0
    """By how much an answer's logprobs differ from the truth's on average, at most."""
    bound: float = 0.0
    """What that may be."""

    @property
    def ok(self) -> bool:
        return self.status in ("equal", "refused")


class CellFailed(Exception):
    """The cell is decided; carries status and detail."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
