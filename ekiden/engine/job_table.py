"""The requests inside an engine, and what moves them from state to state."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from ekiden.core.clock import Clock
from ekiden.core.config import SpeculativeConfig
from ekiden.core.errors import BadRequest, InvariantBroken
from ekiden.core.types import Delta, Request
from ekiden.engine.intake import Intake
from ekiden.engine.job import Job, Role
from ekiden.engine.meters import Meters
from ekiden.engine.outputs import EngineOutput, PrefillDone, RequestFinished, Started
from ekiden.engine.plan import Sampled
from ekiden.engine.scheduling.schedule import ScheduledChunk
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Sequence
from ekiden.engine.speculation import PromptLookup


class JobTable:
    """Requests by id. What comes out of them is gathered in ``output``."""

    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        *,
        speculative: SpeculativeConfig,
        vocab_size: int,
        meters: Meters,
        clock: Clock,
    ) -> None:
        self.intake = intake
        self.scheduler = scheduler
        self.meters = meters
        self.jobs: dict[str, Job] = {}
        self.output = EngineOutput()
        self._speculative = speculative
        self._vocab_size = vocab_size
        self._clock = clock

    def find(self, request_id: str, role: Role) -> Job | None:
        """The request, if it is here in this role."""
        job = self.jobs.get(request_id)
        return job if job is not None and job.role is role else None

    def new(self, request: Request, role: Role) -> Job:
        """A checked request under an id of its own, not yet in the table.

        Raises:
            BadRequest: a field is wrong, the request can never fit, or its id is in use.
        """
        job = self.intake.job(request, role, self._clock.now())
        self.unreserve(request.request_id)
        if request.request_id in self.jobs:
            raise BadRequest(
                f"request id {request.request_id} is in use: every request needs its own",
                field="request_id",
            )
        return job

    def unreserve(self, request_id: str) -> None:
        """Drop a reservation whose hand-off tokens have not come."""
        job = self.find(request_id, Role.RESERVED)
        if job is not None and not job.handed:
            self.drop(job)

    def start(self, job: Job) -> None:
        """Let all unfinished choices wait for their turn, without blocks."""
        for output, choices in job.groups().items():
            self.scheduler.add(self.intake.sequence(job, output, choices))
        if job.done:
            self.finish(job)

    def join(self, job: Job) -> None:
        """The reserved trunk has its KV and its first tokens: decode from here on."""
        trunk = job.sequences[0]
        job.role = Role.LOCAL
        job.started = True
        self.scheduler.join(trunk)
        self._fork(job, trunk, [c for c in trunk.choices if job.states[c].finish is None])

    def _fork(self, job: Job, trunk: Sequence, alive: list[int]) -> None:
        """Let the choices of ``trunk`` that go on part; those that ended give up their share."""
        job.sequences.remove(trunk)
        if alive:
            first_tokens = [(choice, job.states[choice].output[-1]) for choice in alive]
            branches = self.scheduler.fork(trunk, first_tokens)
            job.preemptions += sum(not branch.blocks for branch in branches)
            job.sequences += branches
            for branch in branches:
                self._propose(job, branch)
        else:
            self.scheduler.remove(trunk)

    def _propose(self, job: Job, sequence: Sequence) -> None:
        """Say what may follow the one choice of ``sequence``; the token after that may come too."""
        most = self._speculative.num_speculative_tokens
        if not most:
            return
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(self._speculative, sequence.max_tokens)
        room = job.states[sequence.choices[0]].room - 1
        sequence.draft = sequence.lookup.propose(sequence.tokens, min(most, room))

    def note_start(self, job: Job, sequence: Sequence) -> None:
        """Its first chunk goes into a step: what was cached is known now."""
        job.started = True
        prompt = len(job.request.prompt)
        job.cached_tokens = min(sequence.cached, prompt)
        job.computed_tokens = prompt - job.cached_tokens
        self.output.events.append(Started(sequence.request_id, job.cached_tokens))

    def take_samples(
        self, job: Job, chunk: ScheduledChunk, sampled: Mapping[tuple[int, int], Items[Sampled]]
    ) -> None:
        """The last known token of a sequence is computed: take what follows of each choice.

        ``sampled`` by (sequence, choice): a token for each position, the draft's included.

        Raises:
            InvariantBroken: a token is missing or outside the vocabulary.
        """
        sequence, draft = chunk.sequence, chunk.draft
        for choice in sequence.choices:
            samples = sampled.get((sequence.number, choice), ())
            self._check_samples(samples, sequence, choice, len(draft) + 1)
            tokens = self._take(job, choice, samples, draft)
        if job.role is Role.PREFILL:
            self._park(job, sequence)
            return
        if len(sequence.choices) == 1:
            self._extend(job, sequence, tokens)
        else:
            alive = [choice for choice in sequence.choices if job.states[choice].finish is None]
            self._fork(job, sequence, alive)
        if job.done:
            self.finish(job)

    def _check_samples(
        self, samples: Items[Sampled], sequence: Sequence, choice: int, expected: int
    ) -> None:
        usable = all(0 <= sample.token < self._vocab_size for sample in samples)
        if len(samples) != expected or not usable:
            raise InvariantBroken(
                f"the executor sampled {list(samples)} for sequence {sequence.number}, "
                f"choice {choice}: expected {expected} tokens"
            )

    def _take(
        self, job: Job, choice: int, samples: Items[Sampled], draft: tuple[int, ...]
    ) -> list[int]:
        """Take the first sample, and each one whose position the draft had led to rightly."""
        tokens: list[int] = []
        for sample, proposed in zip(samples, (*draft, None), strict=True):
            delta = job.take(choice, sample.token, sample.logprobs)
            self.tell(job, delta)
            tokens.append(sample.token)
            if delta.finish is not None or sample.token != proposed:
                break
        self.meters.speculated(len(draft), len(tokens) - 1)
        return tokens

    def _extend(self, job: Job, sequence: Sequence, tokens: list[int]) -> None:
        """Let the one choice of ``sequence`` go on after ``tokens``, if it does."""
        self.scheduler.extend(sequence, tokens)
        if job.states[sequence.choices[0]].finish is None:
            self._propose(job, sequence)
        else:
            job.sequences.remove(sequence)
            self.scheduler.remove(sequence)

    def _park(self, job: Job, sequence: Sequence) -> None:
        self.scheduler.detach(sequence)
        done = PrefillDone(sequence.request_id, job.cached_tokens, job.computed_tokens)
        self.output.events.append(done)

    def tell(self, job: Job, delta: Delta) -> None:
        """Put a delta out, and note when the first token came."""
        now = self._clock.now()
        if len(job.states[delta.choice].output) == 1 and not delta.choice:
            job.first_at = now
            self.meters.ttft_s.add(now - job.added_at)
        self.output.deltas.append(delta)

    def finish(self, job: Job) -> None:
        """Its last choice has ended: drop it and put its account out."""
        self.drop(job)
        longest = max(len(state.output) for state in job.states)
        if longest > 1:
            self.meters.tpot_s.add((self._clock.now() - job.first_at) / (longest - 1))
        self.output.finished.append(
            RequestFinished(
                request_id=job.request.request_id,
                completion_tokens=job.completion_tokens,
                cached_tokens=job.cached_tokens,
                computed_tokens=job.computed_tokens,
                preemptions=job.preemptions,
            )
        )

    def drop(self, job: Job) -> None:
        """Forget it, and everything it owns."""
        self.release(job)
        del self.jobs[job.request.request_id]

    def release(self, job: Job) -> None:
        """Give up its sequences and their blocks; the request itself stays."""
        for sequence in job.sequences:
            self.scheduler.remove(sequence)
        job.sequences.clear()
