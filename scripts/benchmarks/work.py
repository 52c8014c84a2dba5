"""The kinds of work that engines are measured on."""

from __future__ import annotations

from typing import NamedTuple

CONTEXT = 128
"""Tokens in the cache of each stream when its decoding begins."""


class Prefill(NamedTuple):
    """One prompt, to its first token."""

    prompt: int

    @property
    def tokens(self) -> int:
        return self.prompt

    @property
    def name(self) -> str:
        return f"prefill-{self.prompt}"

    def __str__(self) -> str:
        return f"prefill {self.prompt:,}"


class Decode(NamedTuple):
    """One step of ``batch`` streams."""

    batch: int
    context: int = CONTEXT

    @property
    def tokens(self) -> int:
        return self.batch

    @property
    def name(self) -> str:
        return f"decode-{self.batch}"

    def __str__(self) -> str:
        return f"decode batch {self.batch}"


Work = Prefill | Decode
"""``tokens`` is what a rate in tokens a second counts, ``name`` what a command line calls it."""
