"""Who hears of what happens on a replica."""

from __future__ import annotations

from typing import Protocol

from ekiden.sim.asked import Asked


class Owner(Protocol):
    """Hears what becomes of its sequence."""

    asked: Asked
    """The request that it is of."""

    def ready(self) -> None:
        """The hand-off's turn is near."""

    def started(self) -> None:
        """Its first chunk is in a step."""

    def computed(self, stop: int) -> None:
        """Positions before ``stop`` have their KV."""

    def sampled(self) -> None:
        """There is a first token."""

    def finished(self) -> None:
        """There is the last one; the sequence is gone."""

    def preempted(self) -> None:
        """Its blocks were taken."""


class Caller(Protocol):
    """Hears when a replica dies."""

    def lost(self) -> None: ...
