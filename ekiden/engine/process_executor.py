"""A replica whose ranks are processes of this machine, spawned and never forked.

Plans are broadcast to all ranks, which run them in order; the stage links between them do the
rest. A step is over when every rank has said so, and the sampling rank's answer holds the tokens.
The first cause of a failure ends the replica: every later call raises it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from ekiden.cache.layout import DTYPE_BYTES, KvLayout
from ekiden.core.clock import Clock, MonotonicClock
from ekiden.core.config import EngineConfig
from ekiden.core.errors import EkidenError, InvariantBroken, ReplicaFailed, SetupError
from ekiden.engine.capacity import resolve_num_blocks, resolve_threads
from ekiden.engine.executor import PortListener, ranks_to_tell, sampling_rank
from ekiden.engine.feed import tokens_of
from ekiden.engine.in_flight import InFlight, PortMail, Startup
from ekiden.engine.plan import StepPlan, StepResult
from ekiden.engine.rank_link import RankLink, RankLoop
from ekiden.engine.tables import TablePacker
from ekiden.engine.wire import (
    Beat,
    Broken,
    Close,
    Done,
    Down,
    FromPort,
    Loading,
    Ready,
    Setup,
    Step,
    Tokens,
    ToPort,
    Up,
    frame,
)
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout

if TYPE_CHECKING:
    from ekiden.parallel.rendezvous import MeshHost

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
SILENCE_S = 6.0
"""A rank beats every half second; one that is silent for this long is stopped or starved."""
CLOSE_S = 5.0
"""Seconds that ranks have to end when asked, before they are killed."""
BROKEN_CLOSE_S = 0.5
"""The same for the ranks of a replica that has failed: they wait for each other, most likely."""
KILL_S = 10.0


class ProcessExecutor:
    """Implements ``ekiden.engine.executor.HostingExecutor``, a process for each rank."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        port: str | None = None,
        port_options: bytes = b"",
        epoch: int = 0,
        name: str = "replica",
        progress: Callable[[str, int, int], None] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        silence_s: float = SILENCE_S,
        clock: Clock | None = None,
    ) -> None:
        """Start the ranks and wait until every one is ready.

        ``port`` names a PortFactory as ``module:attribute``. ``name`` is what the log of a rank
        calls the replica. ``progress(what, done, total)`` hears of bytes of weights read, all ranks
        together, on the calling thread. A rank that is silent for ``silence_s`` is named by
        ``healthy``.

        Raises:
            SetupError: the configuration cannot work, or a rank met a SetupError: the same
                sentence.
            ReplicaFailed: a rank died or broke while it started.
            DeadlineExceeded: not ready within ``start_timeout_s``.
        """
        self._clock = clock or MonotonicClock()
        self._layout = kv_layout(model, config.check())
        self._num_blocks = resolve_num_blocks(model, config, self._layout)
        ranks = len(self._layout.ranks)
        self._max_in_flight = config.steps_in_flight
        self._to_tell = ranks_to_tell(self._layout, config)
        self._in_flight = InFlight(ranks, self._max_in_flight, self._layout.tp, clock=self._clock)
        self._startup = Startup(ranks, self._clock)
        self._tables = TablePacker()
        self._mail = PortMail()
        self._has_port = port is not None
        self._silence_s = silence_s
        self._closed = False
        self._closing = Lock()
        self._mesh = _host_mesh(config, model, self._layout)
        self._links = [RankLink(rank, self._clock) for rank in range(ranks)]
        self._loop = RankLoop(
            self._links,
            on_message=self._on_message,
            on_end=self._on_end,
            on_crash=self._on_crash,
            clock=self._clock,
        )
        self._loop.start()
        try:
            self._set_up(config, model, port or "", port_options, epoch, name)
            endpoints = self._startup.wait(start_timeout_s, progress)
        except BaseException:
            self.close()
            raise
        self._endpoints = endpoints if self._has_port else ()

    def _set_up(
        self,
        config: EngineConfig,
        model: ModelConfig,
        port: str,
        options: bytes,
        epoch: int,
        name: str,
    ) -> None:
        threads = resolve_threads(config, len(self._links))
        mesh = msgspec.msgpack.encode(self._mesh.spec)
        for link in self._links:
            setup = Setup(
                name=name,
                rank=link.rank,
                parent=os.getpid(),
                config=config,
                model=model,
                layout=self._layout,
                num_blocks=self._num_blocks,
                mesh=mesh,
                port=port,
                port_options=options,
                epoch=epoch,
                threads=threads,
            )
            self._send(link, setup)

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

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the ranks, in order; for logs and for tests that kill them."""
        return tuple(link.process.pid for link in self._links if link.process)

    def submit(self, plan: StepPlan) -> None:
        self._in_flight.submit(plan.step)
        message = frame(Step(*self._tables.pack(plan)))
        for link in self._links:
            self._write(link, message)

    def collect(self, timeout_s: float) -> StepResult:
        return self._in_flight.collect(timeout_s)

    def host(self, turn: Callable[[], None]) -> None:
        self._loop.guest = turn
        self.wake()

    def wake(self) -> None:
        self._loop.wake()

    @property
    def failure(self) -> EkidenError | None:
        return self._in_flight.failure

    def poll(self, timeout_s: float) -> StepResult | None:
        return self._in_flight.poll(timeout_s)

    def send_port(self, message: bytes, rank: int | None = None) -> None:
        if not self._has_port:
            raise InvariantBroken("send_port needs a KV port, and the ranks have none")
        for link in self._links if rank is None else [self._links[rank]]:
            self._send(link, ToPort(message))

    def on_port_message(self, listener: PortListener) -> None:
        self._mail.listen(listener)

    def healthy(self) -> str | None:
        if self._in_flight.failure is not None:
            return self._in_flight.failure.message
        for link in self._links:
            silent_s = self._loop.looked_at - (link.heard_at or self._loop.looked_at)
            if silent_s > self._silence_s:
                return (
                    f"rank {link.rank} (process {self.processes[link.rank]}) has not moved for "
                    f"{silent_s:.0f} s: it is stopped, or starved of processor time"
                )
        return None

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            grace = CLOSE_S if self._in_flight.failure is None else BROKEN_CLOSE_S
            self._in_flight.fail(ReplicaFailed("the replica has been closed"))
            self._loop.spawned.wait(KILL_S)
            self._ask_to_end(grace)
            for link in self._links:
                link.kill(KILL_S)
            self._loop.stop(KILL_S)
            self._mesh.close()

    def _ask_to_end(self, grace_s: float) -> None:
        deadline = self._clock.now() + grace_s
        for link in self._links:
            with suppress(ReplicaFailed):
                self._send(link, Close())
        for link in self._links:
            link.ended.wait(max(0.0, deadline - self._clock.now()))

    def _send(self, link: RankLink, message: Down) -> None:
        self._write(link, frame(message))

    def _write(self, link: RankLink, data: bytes) -> None:
        if link.send(data):
            self._loop.wake()

    # From here on: called on the loop's thread.

    def _on_message(self, rank: int, message: Up) -> None:
        match message:
            case Done(result):
                self._tell_tokens(rank, result)
                self._in_flight.done(rank, result)
            case FromPort(data):
                self._mail.deliver(rank, data)
            case Loading(done, total):
                self._startup.loading(rank, done, total)
            case Ready(endpoint):
                self._startup.ready(rank, endpoint)
            case Broken(text, setup, detail):
                if detail:
                    log.error("rank %d: %s", rank, detail)
                failure = ReplicaFailed(f"rank {rank}: {text}")
                self._fail(failure, at_start=SetupError(text) if setup else failure)
            case Beat():
                pass  # That it came is noted on the link.

    def _tell_tokens(self, rank: int, result: StepResult) -> None:
        """Let a step that was planned ahead go on, before the engine takes its turn."""
        if self._to_tell and result.sampled and rank == sampling_rank(self._layout):
            tokens = frame(Tokens(result.step, tokens_of(result.sampled)))
            for other in self._to_tell:
                self._write(self._links[other], tokens)

    def _on_end(self, rank: int, how: str) -> None:
        if not self._closed:
            self._fail(ReplicaFailed(f"rank {rank} {how}"))

    def _on_crash(self, error: Exception) -> None:
        log.error("the thread that watches the ranks failed", exc_info=error)
        self._fail(ReplicaFailed(f"the ranks cannot be reached: {type(error).__name__}: {error}"))

    def _fail(self, failure: ReplicaFailed, at_start: EkidenError | None = None) -> None:
        self._startup.fail(at_start or failure)
        self._in_flight.fail(failure)


def _host_mesh(config: EngineConfig, model: ModelConfig, layout: KvLayout) -> MeshHost:
    # Late, since it brings torch: a service imports this file long before it starts ranks.
    from ekiden.parallel.rendezvous import host_mesh

    # What one step hands from stage to stage, at most.
    row = model.hidden_size * DTYPE_BYTES[model.resolve_dtype(config)]
    return host_mesh(
        layout.tp,
        layout.pp,
        timeout_s=config.step_timeout_s,
        device=config.device,
        message_bytes=config.max_num_batched_tokens * row,
    )
