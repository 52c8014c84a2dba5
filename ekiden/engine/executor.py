"""The interface between the engine's driver and whatever runs its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ekiden.cache.layout import KvLayout
from ekiden.core.config import EngineConfig
from ekiden.core.errors import EkidenError
from ekiden.engine.plan import StepPlan, StepResult

PortListener = Callable[[int, bytes], None]
"""(rank, message) for everything a rank's KV port emits; called on a thread of the executor."""


def sampling_rank(layout: KvLayout) -> int:
    """The rank that has the logits: TP rank 0 of the last stage."""
    return (layout.pp - 1) * layout.tp


def ranks_to_tell(layout: KvLayout, config: EngineConfig) -> list[int]:
    """Ranks that must hear of sampled tokens: they embed them and did not sample them."""
    embedding = range(layout.tp) if config.plans_ahead else ()
    return [rank for rank in embedding if rank != sampling_rank(layout)]


class Executor(Protocol):
    """Runs steps on the ranks of one replica, in order.

    Up to ``max_in_flight`` steps may be submitted before the first is collected: pipeline stages
    work on different steps at once, and a step planned ahead is there when the one before it
    ends (``ekiden.engine.feed``). One thread submits and one, the same or another, collects;
    ``send_port`` is anybody's.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int:
        """KV blocks, the same number on every rank."""

    @property
    def max_in_flight(self) -> int: ...

    @property
    def endpoints(self) -> tuple[bytes, ...]:
        """What each rank's KV port said in ``describe``; empty without a port."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step. Returns at once."""

    def collect(self, timeout_s: float) -> StepResult:
        """The result of the oldest submitted step.

        Raises:
            ReplicaFailed: a rank died or raised; the message names the rank and the cause.
            DeadlineExceeded: nothing within ``timeout_s``.
        """

    def send_port(self, message: bytes, rank: int | None = None) -> None:
        """Give ``message`` to the KV port of one rank, or of every rank. Any thread."""

    def on_port_message(self, listener: PortListener) -> None:
        """Set who hears the ports. Set once, before the first ``send_port``."""

    def healthy(self) -> str | None:
        """None, or one sentence that says which rank is dead or has not moved for too long."""

    def close(self) -> None:
        """End every rank and wait for it, with a deadline; kills what does not end."""


class HostingExecutor(Executor, Protocol):
    """An executor that hears its ranks on a thread of its own and lends it to the engine.

    So a result is applied, told and followed by the next plan without waking another thread.
    """

    def host(self, turn: Callable[[], None]) -> None:
        """From now on call ``turn`` on that thread, always the same one: whenever a rank has said
        something, after each ``wake``, and at least every second. Set once.
        """

    def wake(self) -> None:
        """Make ``turn`` be called soon. Any thread."""

    @property
    def failure(self) -> EkidenError | None:
        """What the replica was lost for, whether or not a step was in flight then."""

    def poll(self, timeout_s: float) -> StepResult | None:
        """The result of the oldest submitted step, if it is there: ``collect`` without waiting.

        Raises:
            ReplicaFailed: a step is in flight that will never end, as in ``collect``.
            DeadlineExceeded: the oldest step has been waited for longer than ``timeout_s``.
        """
