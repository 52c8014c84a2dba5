"""A replica's speed, exponentially averaged over its steps and requests."""

from __future__ import annotations

from collections.abc import Sequence as Items

from ekiden.cache.block_pool import BlockPool
from ekiden.core.types import ReplicaStats
from ekiden.engine.plan import StepResult
from ekiden.engine.scheduling.queues import Queues
from ekiden.engine.scheduling.schedule import ScheduledChunk

WEIGHT = 0.2
"""Share of the newest sample in an average."""

KEPT = 0.99
"""What a step still counts for, one step later, where sums are kept: about 100 steps in all."""


class Average:
    """An exponentially weighted mean; 0 until the first sample."""

    def __init__(self) -> None:
        self.value = 0.0
        self._empty = True

    def add(self, sample: float) -> None:
        self.value = sample if self._empty else self.value + WEIGHT * (sample - self.value)
        self._empty = False


class Rate:
    """One sum over another, of the last samples; older ones count less and less. A large sample
    says more than a small one, and none of the last few decides alone."""

    def __init__(self) -> None:
        self._over = self._under = 0.0

    def add(self, over: float, under: float) -> None:
        self._over = KEPT * self._over + over
        self._under = KEPT * self._under + under

    @property
    def value(self) -> float:
        """0 until there is a sample."""
        return self._over / self._under if self._under > 0 else 0.0


class Shares:
    """Parts of a whole, both summed over the last steps; older ones count less and less."""

    def __init__(self) -> None:
        self._whole = 0.0
        self._parts: tuple[float, ...] = ()

    def add(self, whole: float, parts: tuple[float, ...]) -> None:
        before = self._parts or (0.0,) * len(parts)
        self._parts = tuple(KEPT * old + new for old, new in zip(before, parts, strict=True))
        self._whole = KEPT * self._whole + whole

    @property
    def values(self) -> tuple[float, ...]:
        """Each part over the whole; empty until there is one."""
        whole = self._whole
        return tuple(part / whole for part in self._parts) if whole > 0 else ()


class Meters:
    """Written by the engine's thread; each figure can be read from any other."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = Rate()
        self.step_s = Rate()
        self.step_rows = Rate()
        self.ttft_s = Average()
        self.tpot_s = Average()
        self.busy = Shares()
        """Of the time with steps in flight: what each stage computed."""
        self.collective = Shares()
        """Of what the slowest rank of a step computed: what it was in collectives."""
        self.proposed_tokens = 0
        self.accepted_tokens = 0
        self._ended_at = 0.0

    def speculated(self, proposed: int, accepted: int) -> None:
        """So many tokens were proposed to the model, and so many of them were right."""
        self.proposed_tokens += proposed
        self.accepted_tokens += accepted

    def step_ended(
        self, chunks: Items[ScheduledChunk], result: StepResult, submitted_at: float, now: float
    ) -> None:
        """A step of ``chunks`` ended ``now``.

        With several steps in flight it took the time since the one before it ended.
        """
        seconds = now - max(submitted_at, self._ended_at)
        self._ended_at = now
        self.busy.add(seconds, result.stage_s)
        self.collective.add(result.compute_s, (result.collective_s,))
        sizes = [chunk.stop - chunk.start for chunk in chunks]
        rows = sum(size == 1 for size in sizes)
        self.measured(rows, sum(sizes) - rows, seconds)

    def measured(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of ``rows`` decode rows and ``tokens`` of prompts took ``seconds``."""
        if not tokens:
            self.step_s.add(seconds, 1)
            self.step_rows.add(rows, 1)
        # A prompt's short tail in a step full of rows says little about the speed of prefill.
        elif tokens > rows and seconds > 0:
            self.prefill_tokens_per_s.add(tokens, seconds)


def replica_stats(queues: Queues, pool: BlockPool, meters: Meters) -> ReplicaStats:
    """The load of this moment, read without a lock."""
    waiting = [*queues.closed, *queues.announced, *queues.waiting]
    running = list(queues.running)
    uncomputed = sum(len(sequence.tokens) for sequence in waiting)
    uncomputed += sum(sequence.remaining for sequence in running if sequence.remaining > 1)
    return ReplicaStats(
        running=len(running),
        waiting=len(waiting),
        receiving=len(queues.reserved),
        waiting_tokens=uncomputed,
        kv_blocks_total=pool.total,
        kv_blocks_held=pool.held,
        kv_blocks_cached=pool.cached,
        prefill_tokens_per_s=meters.prefill_tokens_per_s.value,
        step_s=meters.step_s.value,
        step_rows=meters.step_rows.value,
        ttft_s=meters.ttft_s.value,
        tpot_s=meters.tpot_s.value,
        stage_idle=tuple(max(0.0, 1.0 - share) for share in meters.busy.values),
        collective_share=sum(meters.collective.values),
        spec_proposed_tokens=meters.proposed_tokens,
        spec_accepted_tokens=meters.accepted_tokens,
    )
