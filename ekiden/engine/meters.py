"""A replica's speed, exponentially averaged over its steps and requests."""

from __future__ import annotations

WEIGHT = 0.2
"""Share of the newest sample in an average."""


class Average:
    """An exponentially weighted mean; 0 until the first sample."""

    def __init__(self) -> None:
        self.value = 0.0
        self._empty = True

    def add(self, sample: float) -> None:
        self.value = sample if self._empty else self.value + WEIGHT * (sample - self.value)
        self._empty = False


class Meters:
    """Written by the engine's thread; each figure can be read from any other."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = Average()
        self.step_s = Average()
        self.ttft_s = Average()
        self.tpot_s = Average()

    def step(self, *, prefill_tokens: int, rows: int, seconds: float) -> None:
        """One step took ``seconds``; it computed ``prefill_tokens`` and ``rows`` decode rows."""
        if rows and not prefill_tokens:
            self.step_s.add(seconds)
        # A short tail of a prompt in a step full of rows says little about prefill's speed.
        if prefill_tokens > rows and seconds > 0:
            self.prefill_tokens_per_s.add(prefill_tokens / seconds)
