"""A replica whose ranks are threads of this process: the reference, for ``verify`` and tests.

It runs the same ``Rank`` as a rank process does, over the local mesh.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from threading import Thread

import torch

from ekiden.cache.layout import KvLayout
from ekiden.core.clock import MonotonicClock
from ekiden.core.config import EngineConfig
from ekiden.core.errors import EkidenError, InvariantBroken, ReplicaFailed, SetupError
from ekiden.engine.capacity import resolve_num_blocks
from ekiden.engine.executor import PortListener, ranks_to_tell, sampling_rank
from ekiden.engine.feed import Work, tokens_of
from ekiden.engine.in_flight import InFlight, PortMail, Startup
from ekiden.engine.plan import StepPlan, StepResult
from ekiden.engine.port import PortFactory
from ekiden.engine.rank import Rank, open_rank
from ekiden.engine.wire import Tokens
from ekiden.layers.backends.choose import Threads
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout
from ekiden.parallel.local import local_meshes
from ekiden.parallel.mesh import Mesh

START_TIMEOUT_S = 600.0
CLOSE_S = 10.0
MAX_QUEUED = 65536
"""Plans and port messages that may wait for one rank."""


class InlineExecutor:
    """Implements ``ekiden.engine.executor.Executor`` over one thread for each rank."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        port: PortFactory | None = None,
        port_options: bytes = b"",
        epoch: int = 0,
    ) -> None:
        """Load the model and wait until every rank is ready.

        Each rank computes with as many threads as torch has been told; ``threads_per_rank`` is
        left to the caller, since that is a setting of the whole process.

        Raises:
            SetupError: the configuration or the checkpoint cannot work.
        """
        self._layout = kv_layout(model, config.check())
        self._num_blocks = resolve_num_blocks(model, config, self._layout)
        ranks = len(self._layout.ranks)
        self._max_in_flight = config.steps_in_flight
        self._to_tell = ranks_to_tell(self._layout, config)
        self._in_flight = InFlight(ranks, self._max_in_flight, self._layout.tp)
        self._startup = Startup(ranks, MonotonicClock())
        self._mail = PortMail()
        self._has_port = port is not None
        self._closed = False

        threads = Threads(share=torch.get_num_threads())

        def open_one(mesh: Mesh) -> Rank:
            return open_rank(
                config,
                model,
                mesh=mesh,
                layout=self._layout,
                num_blocks=self._num_blocks,
                threads=threads,
                port_factory=port,
                port_options=port_options,
                epoch=epoch,
                emit=lambda message: self._mail.deliver(mesh.rank, message),
            )

        meshes = local_meshes(self._layout.tp, self._layout.pp, config.step_timeout_s)
        self._threads = [_RankThread(mesh, open_one, self) for mesh in meshes]
        for thread in self._threads:
            thread.start()
        try:
            endpoints = self._startup.wait(START_TIMEOUT_S, progress=None)
        except BaseException:
            self.close()
            raise
        self._endpoints = endpoints if self._has_port else ()

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def endpoints(self) -> tuple[bytes, ...]:
        return self._endpoints

    def submit(self, plan: StepPlan) -> None:
        self._in_flight.submit(plan.step)
        for thread in self._threads:
            thread.give(plan)

    def collect(self, timeout_s: float) -> StepResult:
        return self._in_flight.collect(timeout_s)

    def send_port(self, message: bytes, rank: int | None = None) -> None:
        if not self._has_port:
            raise InvariantBroken("send_port needs a KV port, and the ranks have none")
        for thread in self._threads if rank is None else [self._threads[rank]]:
            thread.give(message)

    def on_port_message(self, listener: PortListener) -> None:
        self._mail.listen(listener)

    def healthy(self) -> str | None:
        failure = self._in_flight.failure
        return failure.message if failure is not None else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._in_flight.fail(ReplicaFailed("the replica has been closed"))
        for thread in self._threads:
            thread.give(None)
        for thread in self._threads:
            thread.join(CLOSE_S)

    # From here on: called on the ranks' threads.

    def ready(self, rank: int, endpoint: bytes) -> None:
        self._startup.ready(rank, endpoint)

    def done(self, rank: int, result: StepResult) -> None:
        if rank == sampling_rank(self._layout) and result.sampled:
            for other in self._to_tell:
                self._threads[other].give(Tokens(result.step, tokens_of(result.sampled)))
        self._in_flight.done(rank, result)

    def broken(self, rank: int, error: Exception) -> None:
        failure = ReplicaFailed(f"rank {rank}: {_sentence(error)}")
        failure.__cause__ = error
        self._startup.fail(error if isinstance(error, SetupError) else failure)
        self._in_flight.fail(failure)


class _RankThread(Thread):
    """One rank: takes its work in order, as the main thread of a rank process does."""

    def __init__(
        self, mesh: Mesh, open_one: Callable[[Mesh], Rank], executor: InlineExecutor
    ) -> None:
        super().__init__(name=f"ekiden-rank-{mesh.rank}", daemon=True)
        self._mesh = mesh
        self._open = open_one
        self._executor = executor
        self._work: queue.Queue[Work | Tokens | None] = queue.Queue(MAX_QUEUED)

    def give(self, work: Work | Tokens | None) -> None:
        """Raises ReplicaFailed if the rank has MAX_QUEUED things to do already."""
        try:
            self._work.put_nowait(work)
        except queue.Full:
            raise ReplicaFailed(f"rank {self._mesh.rank} does not take its work") from None

    def run(self) -> None:
        try:
            rank = self._open(self._mesh)
            try:
                self._executor.ready(self._mesh.rank, rank.endpoint)
                self._serve(rank)
            finally:
                rank.close()
        except Exception as error:
            self._executor.broken(self._mesh.rank, error)
            self._mesh.abort(_sentence(error))
        finally:
            self._mesh.close()

    def _serve(self, rank: Rank) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, Tokens):
                rank.feed.tell(work.step, work.tokens)
            else:
                rank.feed.put(work)
            rank.work(lambda result: self._executor.done(self._mesh.rank, result))


def _sentence(error: Exception) -> str:
    return error.message if isinstance(error, EkidenError) else f"{type(error).__name__}: {error}"
