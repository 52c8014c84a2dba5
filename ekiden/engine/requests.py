"""Requests of every role, from their arrival until they run, and what ends them early. No torch.

The life of a request, by role:

- **local** (``add``): waits -> chunks of its prompt -> first tokens -> decode rows -> finished.
- **prefill** (``add_handoff``): waits -> ``Ready`` -> ``open_session`` -> ``Started``, chunks that
  carry the session -> hand-off tokens, ``PrefillDone`` -> parked until ``let_go``.
- **decode** (``reserve``): has blocks, which the writer owns too -> ``hand_off`` (tokens, before
  their KV) -> ``adopt`` (the KV is there) or ``recompute`` (it will not come) -> as local.
  ``writer_done`` may come at any time; until then the written blocks are never free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ekiden.cache.block_pool import BlockPool
from ekiden.cache.prefix_index import Parent
from ekiden.core.config import EngineConfig
from ekiden.core.types import Delta, Request
from ekiden.engine.intake import Intake
from ekiden.engine.job import Role, check_hand_off
from ekiden.engine.job_table import JobTable
from ekiden.engine.outputs import Reservation
from ekiden.engine.scheduling.scheduler import Scheduler
from ekiden.engine.scheduling.sequence import Gate
from ekiden.engine.writers import Writers


class Requests:
    """What an engine can be told of requests; it tells of them in the table's output."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        pool: BlockPool,
        intake: Intake,
        scheduler: Scheduler,
        table: JobTable,
        vocab_size: int,
    ) -> None:
        self.config = config
        self.pool = pool
        self._intake = intake
        self._scheduler = scheduler
        self._table = table
        self._vocab_size = vocab_size
        self._writers = Writers(pool)

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
        return Reservation(
            key=self._writers.hold(blocks),
            blocks=tuple(blocks),
            held_tokens=len(blocks) * self.config.block_size,
        )

    def hold_free(self, tokens: int) -> Reservation:
        """Hold blocks for about ``tokens`` positions of no request, fewer if fewer are free.
        Nothing cached is pushed out but one block where none is free, as in any pool that has
        worked for a while. ``writer_done`` with the key lets go."""
        count = min(-(-tokens // self.config.block_size), max(self.pool.free, 1))
        blocks = self.pool.allocate(count) or []
        key = self._writers.hold(blocks)
        self.pool.release(blocks)
        return Reservation(key=key, blocks=tuple(blocks), held_tokens=0)

    def hold_prefix(self, tokens: Sequence[int], salt: str) -> Reservation | None:
        """Hold blocks for the whole blocks of ``tokens``: cached ones as they are, and others for
        KV that another replica will write. None: no room. ``held_tokens`` are the cached ones."""
        chain = self._intake.chain_of(salt)
        keys = chain.upto(tokens, len(tokens))
        hits = self.pool.find(chain.root, keys)
        self.pool.retain(hits)
        fresh = self.pool.allocate(len(keys) - len(hits))
        blocks = hits + (fresh or [])
        key = self._writers.hold(blocks)
        self.pool.release(blocks)
        if fresh is None:
            self._writers.done(key)
            return None
        held = len(hits) * self.config.block_size
        return Reservation(key=key, blocks=tuple(blocks), held_tokens=held)

    def publish_prefix(self, tokens: Sequence[int], salt: str, blocks: Sequence[int]) -> None:
        """``blocks``, which ``hold_prefix`` holds, have the KV of ``tokens`` now: let requests find
        them."""
        chain = self._intake.chain_of(salt)
        parent: Parent | None = chain.root
        for block, key in zip(blocks, chain.upto(tokens, len(tokens)), strict=True):
            if parent is not None:
                parent = self.pool.publish(block, key, parent)

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
        written = trunk.blocks[trunk.cached // self.config.block_size :]
        return Reservation(
            key=self._writers.hold(written), blocks=tuple(trunk.blocks), held_tokens=trunk.cached
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
        self._writers.done(key)

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
