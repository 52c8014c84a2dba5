"""The engine's driver: requests in, steps to the executor, tokens out. No torch.

The life of a request, by role:

- **local** (``add``): waits -> chunks of its prompt -> first tokens -> decode rows -> finished.
- **prefill** (``add_handoff``): waits -> ``Ready`` -> ``open_session`` -> ``Started``, chunks that
  carry the session -> hand-off tokens, ``PrefillDone`` -> parked until ``let_go``.
- **decode** (``reserve``): has blocks, which the writer owns too -> ``hand_off`` (tokens, before
  their KV) -> ``adopt`` (the KV is there) or ``recompute`` (it will not come) -> as local.
  ``writer_done`` may come at any time; until then the written blocks are never free.

Used from one thread. ``next_plan``, ``apply`` and ``take_output`` are the parts of ``step``, for a
caller who does not want to wait inside it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ekiden.cache.block_pool import BlockPool
from ekiden.core.clock import Clock
from ekiden.core.config import EngineConfig
from ekiden.core.errors import InvariantBroken
from ekiden.core.types import BlockBooks, Delta, ReplicaStats, Request
from ekiden.engine.advance import TextFactory
from ekiden.engine.audit import audit_blocks
from ekiden.engine.executor import Executor
from ekiden.engine.intake import Intake
from ekiden.engine.job import Role, check_hand_off
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
from ekiden.engine.scheduling.policy import blocks_for
from ekiden.engine.scheduling.schedule import Limits, ScheduledChunk
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Gate

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


class _Step(msgspec.Struct, frozen=True):
    """A submitted step: what was put in, and when."""

    number: int
    chunks: list[ScheduledChunk]
    at: float


class Engine:
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
        self.config = config
        self.executor = executor
        self._vocab_size = vocab_size
        self._clock = clock
        self._intake = Intake(
            config,
            num_blocks=executor.num_blocks,
            eos_token_ids=frozenset(id for id in eos_token_ids if 0 <= id < vocab_size),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            model_fingerprint=model_fingerprint,
            text_factory=text_factory,
        )
        self.pool = BlockPool(executor.num_blocks, caching=config.enable_prefix_caching)
        limits = Limits(
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            micro_batches=config.pipeline_parallel_size,
            plan_ahead=config.plans_ahead,
        )
        if config.async_scheduling and not config.plans_ahead:
            log.info(
                "no step is planned while another one runs: with --speculative-config nobody knows "
                "how many tokens that one will give"
            )
        self._scheduler = Scheduler(self.pool, limits)
        self._meters = Meters()
        self._table = JobTable(
            self._intake,
            self._scheduler,
            speculative=config.speculative_config,
            vocab_size=vocab_size,
            meters=self._meters,
            clock=clock,
        )
        self._writers: dict[int, list[int]] = {}
        self._reservations = 0
        self._in_flight: deque[_Step] = deque()

    # Requests

    def add(self, request: Request, resume: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Prefill and decode ``request`` here.

        ``resume`` gives the tokens of each choice that the client has seen already: generation
        goes on after them as if they had just been sampled, and they are not told again.

        Raises:
            BadRequest: a field is wrong, the request can never fit, or its id is in use.
        """
        job = self._table.new(request, Role.LOCAL)
        ends = job.replay(resume or {})
        self._table.jobs[request.request_id] = job
        self._table.output.deltas += ends
        self._table.start(job)

    def add_handoff(self, request: Request) -> None:
        """Prefill ``request`` for another replica.

        Raises:
            BadRequest: a field is wrong, the prompt can never fit, or its id is in use.
        """
        job = self._table.new(request, Role.PREFILL)
        self._table.jobs[request.request_id] = job
        self._scheduler.add(self._intake.trunk(job, Gate.CLOSED))

    def open_session(self, request_id: str, session: int) -> None:
        """Decode has room: the hand-off may run, and its chunks carry ``session`` (not 0).

        From here on its blocks are held until ``let_go``, even after ``cancel``: the transfer
        reads them. No effect on a request that is gone or open already.
        """
        job = self._table.find(request_id, Role.PREFILL)
        if job is not None and job.sequences[0].gate is not Gate.OPEN:
            self._scheduler.open(job.sequences[0], session)

    def let_go(self, request_id: str) -> None:
        """The transfer reads no more: forget the hand-off, done or not, and its blocks."""
        if (job := self._table.find(request_id, Role.PREFILL)) is not None:
            self._table.drop(job)

    def check(self, request: Request) -> None:
        """Return if ``add`` and ``reserve`` would take the request, whatever the load.

        Raises:
            BadRequest: a field is wrong, or the request can never fit.
        """
        self._intake.check(request, Role.LOCAL)

    def cached_prefix(self, request: Request) -> int:
        """Tokens of the prompt whose KV is here: what neither prefill nor transfer need do."""
        chain = self._intake.chain(request)
        keys = chain.upto(request.prompt, len(request.prompt) - 1)
        return len(self.pool.find(chain.root, keys)) * self.config.block_size

    def hold_cached(self, tokens: Sequence[int], salt: str) -> Reservation:
        """Hold the cached blocks of a token prefix so that they can be read; ``writer_done`` with
        the key lets go. Fewer blocks than the prefix has: the rest is not cached."""
        chain = self._intake.chain_of(salt)
        blocks = self.pool.find(chain.root, chain.upto(tokens, len(tokens)))
        self.pool.retain(blocks)
        self._reservations += 1
        self._writers[self._reservations] = blocks
        return Reservation(
            key=self._reservations,
            blocks=tuple(blocks),
            held_tokens=len(blocks) * self.config.block_size,
        )

    def reserve(self, request: Request) -> Reservation | None:
        """Blocks for the whole prompt, for KV that another replica will write.

        None: no room now; running work is never pushed out for it. A second call for the same
        request, before its hand-off tokens came, gives up the first reservation on the request's
        part and makes another (with another prefill replica); the first writer keeps its own.

        Raises:
            BadRequest: a field is wrong, the request can never fit, or its id is in use.
        """
        job = self._table.new(request, Role.RESERVED)
        trunk = self._intake.trunk(job)
        if not self._scheduler.reserve(trunk):
            return None
        self._table.jobs[request.request_id] = job
        job.cached_tokens = trunk.cached
        self._reservations += 1
        written = trunk.blocks[trunk.cached // self.config.block_size :]
        self.pool.retain(written)
        self._writers[self._reservations] = written
        return Reservation(
            key=self._reservations, blocks=tuple(trunk.blocks), held_tokens=trunk.cached
        )

    def unreserve(self, request_id: str) -> None:
        """Give up a reservation on the request's part; its writer keeps the blocks it may write.

        No effect once the hand-off tokens came: ``recompute`` or ``cancel`` then. ``add`` and
        ``reserve`` do this by themselves.
        """
        self._table.unreserve(request_id)

    def hand_off(self, request_id: str, deltas: Sequence[Delta]) -> None:
        """The first token of every choice, from the prefill replica. Their deltas come out here.

        Finish marks on ``deltas`` are ignored: what ends a choice is decided here, by the same
        rules. No effect on a request that is gone.

        Raises:
            ReplicaFailed: not exactly one usable token a choice. Nothing was told to the client.
        """
        job = self._table.find(request_id, Role.RESERVED)
        if job is None:
            return
        check_hand_off(job, deltas, self._vocab_size)
        for delta in sorted(deltas, key=lambda delta: delta.choice):
            logprobs = delta.logprobs[0] if delta.logprobs else None
            self._table.tell(job, job.take(delta.choice, delta.tokens[0], logprobs))
        if job.done:
            self._table.finish(job)
        elif job.arrived:
            self._table.join(job)

    def adopt(self, request_id: str) -> None:
        """All KV of the reserved blocks has arrived: the request joins the running batch.

        No effect on a request that is gone or that goes its own way already.
        """
        job = self._table.find(request_id, Role.RESERVED)
        if job is None:
            return
        job.arrived = True
        if job.handed:
            self._table.join(job)

    def recompute(self, request_id: str) -> None:
        """The KV will not arrive: compute it here, from the prompt and the tokens seen.

        No effect on a request that is gone or that goes its own way already.
        """
        job = self._table.find(request_id, Role.RESERVED)
        if job is None:
            return
        self._table.release(job)
        job.role = Role.LOCAL
        job.cached_tokens = 0
        self._table.start(job)

    def writer_done(self, key: int) -> None:
        """The writer of reservation ``key`` will not write any more. Repeating it is harmless."""
        self.pool.release(self._writers.pop(key, []))

    def cancel(self, request_id: str) -> bool:
        """Forget a request in any state; False if it is not known. Nothing is told of it again.

        Blocks that a submitted step, a writer or an open session uses stay held until it ends.
        """
        job = self._table.jobs.get(request_id)
        if job is None:
            return False
        if job.role is Role.PREFILL and job.sequences[0].gate is Gate.OPEN:
            job.cancelled = True
            self._scheduler.detach(job.sequences[0])
        else:
            self._table.drop(job)
        return True

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
            self.audit()
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

    def audit(self) -> None:
        """Compare the pool's owners with everybody who should own something.

        Raises:
            InvariantBroken: the books do not balance, or a block has an owner too many or few.
        """
        parked = [sequence for job in self._table.jobs.values() for sequence in job.sequences]
        chunks = [chunk for step in self._in_flight for chunk in step.chunks]
        sequences = (*self._scheduler.queues.all(), *parked)
        audit_blocks(self.pool, sequences, chunks, self._writers.values())

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
