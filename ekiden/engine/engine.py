"""The engine's driver: requests in, steps to the executor, tokens out. No torch.

Requests come in as ``ekiden.engine.requests`` says. Used from one thread. ``next_plan``, ``apply``
and ``take_output`` are the parts of ``step``, for a caller who does not want to wait inside it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import msgspec

from ekiden.cache.block_pool import BlockPool
from ekiden.core.clock import Clock
from ekiden.core.config import EngineConfig
from ekiden.core.errors import InvariantBroken
from ekiden.core.types import BlockBooks, ReplicaStats
from ekiden.engine.advance import TextFactory
from ekiden.engine.audit import audit_blocks
from ekiden.engine.executor import Executor
from ekiden.engine.intake import Intake
from ekiden.engine.job_table import JobTable
from ekiden.engine.meters import Meters, replica_stats
from ekiden.engine.outputs import (
    EngineEvent,
    EngineOutput,
    PrefillDone,
    Ready,
    RequestFinished,
    Reservation,
    Started,
)
from ekiden.engine.plan import UNKNOWN, Chunk, Sampled, StepPlan, StepResult
from ekiden.engine.requests import Requests
from ekiden.engine.scheduling.policy import blocks_for
from ekiden.engine.scheduling.schedule import Limits, ScheduledChunk
from ekiden.engine.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

__all__ = [
    "Engine",
    "EngineEvent",
    "EngineOutput",
    "PrefillDone",
    "Ready",
    "RequestFinished",
    "Reservation",
    "Started",
]


WHOLE_AUDIT_S = 10.0
"""Between two looks at every block of an idle engine's pool, at least."""


class _Step(msgspec.Struct, frozen=True):
    """A submitted step: what was put in, and when."""

    number: int
    chunks: list[ScheduledChunk]
    at: float


class Engine(Requests):
    """One replica's engine over one executor."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        max_model_len: int,
        model_fingerprint: str,
        text_factory: TextFactory,
        clock: Clock,
    ) -> None:
        intake = Intake(
            config,
            num_blocks=executor.num_blocks,
            eos_token_ids=frozenset(id for id in eos_token_ids if 0 <= id < vocab_size),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            model_fingerprint=model_fingerprint,
            text_factory=text_factory,
        )
        pool = BlockPool(executor.num_blocks, caching=config.enable_prefix_caching)
        scheduler = Scheduler(pool, _limits(config))
        meters = Meters()
        table = JobTable(
            intake,
            scheduler,
            speculative=config.speculative_config,
            vocab_size=vocab_size,
            meters=meters,
            clock=clock,
        )
        super().__init__(
            config,
            pool=pool,
            intake=intake,
            scheduler=scheduler,
            table=table,
            vocab_size=vocab_size,
        )
        self.executor = executor
        self._meters = meters
        self._clock = clock
        self._audited_at = float("-inf")
        self._in_flight: deque[_Step] = deque()

    # Steps

    def step(self, timeout: float | None = None) -> EngineOutput:
        """Submit what can run, wait for the oldest step, and return all that came out.

        ``timeout`` in seconds, else ``config.step_timeout_s``. Returns at once when there is
        nothing to wait for.

        Raises:
            ReplicaFailed, DeadlineExceeded: from the executor.
            InvariantBroken: the books do not balance, or the executor answered wrongly.
        """
        while (plan := self.next_plan()) is not None:
            self.executor.submit(plan)
        if self._in_flight:
            limit = self.config.step_timeout_s if timeout is None else timeout
            self.apply(self.executor.collect(limit))
        return self.take_output()

    def has_work(self) -> bool:
        """Whether ``step`` can get on: something is submitted, to be told, running or waiting.

        A hand-off that waits for its session, or a reservation for its KV, is not work.
        """
        queues = self._scheduler.queues
        return bool(self._in_flight or self._table.output or queues.running or queues.waiting)

    def next_plan(self) -> StepPlan | None:
        """The next step, which the caller must submit; None if none can start now."""
        for sequence in self._scheduler.announce():
            self._table.output.events.append(Ready(sequence.request_id))
        if len(self._in_flight) >= self.executor.max_in_flight:
            return None
        schedule = self._scheduler.schedule(len(self._in_flight))
        for sequence in schedule.preempted:
            self._table.jobs[sequence.request_id].preemptions += 1
        if schedule.chunks:
            return self._plan(schedule.number, schedule.chunks)
        if not self._table.jobs and not self._in_flight:
            self._audit_idle()
        return None

    def apply(self, result: StepResult) -> None:
        """Take in the result of the oldest submitted step.

        Raises:
            InvariantBroken: it is another step's, or lacks a token that was asked for.
        """
        if not self._in_flight or self._in_flight[0].number != result.step:
            raise InvariantBroken(f"the executor answered step {result.step} out of turn")
        step = self._in_flight.popleft()
        self._meters.step_ended(step.chunks, result, step.at, self._clock.now())
        sampled: dict[tuple[int, int], list[Sampled]] = {}
        for sample in result.sampled:
            sampled.setdefault((sample.sequence, sample.choice), []).append(sample)
        for chunk in step.chunks:
            last = chunk.is_last
            self._scheduler.collected(chunk)
            job = self._table.jobs.get(chunk.sequence.request_id)
            if last and job is not None and not chunk.sequence.dead and not job.cancelled:
                self._table.take_samples(job, chunk, sampled)

    def take_output(self) -> EngineOutput:
        """What came out since the last time."""
        output, self._table.output = self._table.output, EngineOutput()
        output.room = self._scheduler.made_room()
        return output

    # Figures

    @property
    def in_flight(self) -> int:
        """Submitted steps that have not been applied."""
        return len(self._in_flight)

    def books(self) -> BlockBooks:
        """The block pool's books. Sessions are the service's to count."""
        pool = self.pool
        return BlockBooks(
            total=pool.total,
            free=pool.free,
            cached=pool.cached,
            held=pool.held,
            requests=len(self._table.jobs),
        )

    def stats(self) -> ReplicaStats:
        """The load of this moment. May be read from any thread; then a few numbers behind."""
        return replica_stats(self._scheduler.queues, self.pool, self._meters)

    def _audit_idle(self) -> None:
        """The audit whenever there is nothing to do. Every block is looked at now and then only:
        a hundred thousand of them take ten milliseconds, for which the next request would wait."""
        now = self._clock.now()
        if whole := now - self._audited_at >= WHOLE_AUDIT_S:
            self._audited_at = now
        self.audit(whole=whole)

    def audit(self, *, whole: bool = True) -> None:
        """Compare the pool's owners with everybody who should own something.

        ``whole``: and look at every block of the pool, whoever owns it.

        Raises:
            InvariantBroken: the books do not balance, or a block has an owner too many or few.
        """
        parked = [sequence for job in self._table.jobs.values() for sequence in job.sequences]
        chunks = [chunk for step in self._in_flight for chunk in step.chunks]
        sequences = (*self._scheduler.queues.all(), *parked)
        audit_blocks(self.pool, sequences, chunks, self._writers.held(), whole=whole)

    def _plan(self, number: int, chunks: list[ScheduledChunk]) -> StepPlan:
        self._in_flight.append(_Step(number, chunks, self._clock.now()))
        copies = tuple(chunk.copy for chunk in chunks if chunk.copy is not None)
        return StepPlan(number, tuple(map(self._chunk, chunks)), copies)

    def _chunk(self, chunk: ScheduledChunk) -> Chunk:
        sequence = chunk.sequence
        job = self._table.jobs[sequence.request_id]
        if not job.started:
            self._table.note_start(job, sequence)
        unknown = (UNKNOWN,) if chunk.after else ()
        used = blocks_for(chunk.stop + len(chunk.draft), self.config.block_size)
        return Chunk(
            sequence=sequence.number,
            tokens=(*sequence.tokens[chunk.start : chunk.stop], *unknown, *chunk.draft),
            start=chunk.start,
            blocks=tuple(sequence.blocks[:used]),
            samples=job.specs(sequence.choices, chunk.draft, unknown) if chunk.is_last else (),
            session=sequence.session,
            proposed=len(chunk.draft),
            after=chunk.after,
        )


def _limits(config: EngineConfig) -> Limits:
    if config.async_scheduling and not config.plans_ahead:
        log.info(
            "no step is planned while another one runs: with --speculative-config nobody knows "
            "how many tokens that one will give"
        )
    return Limits(
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        micro_batches=config.pipeline_parallel_size,
        plan_ahead=config.plans_ahead,
    )
