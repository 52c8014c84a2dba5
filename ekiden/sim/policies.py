"""What the gateway's router is compared with: simpler rules over the same knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.placing import Placer
from gateway.routing import Ask, Candidate, requests_at


class RoundRobin(Placer):
    """The next replica in turn, whatever its load."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turn = -1

    def choose(
        self, decode: Sequence[Candidate], prefill: Sequence[Candidate], ask: Ask
    ) -> tuple[Candidate, list[Candidate]]:
        self._turn += 1
        start = self._turn % len(prefill) if prefill else 0
        return decode[self._turn % len(decode)], [*prefill[start:], *prefill[:start]]


class LeastRequests(Placer):
    """The replica with the fewest requests, however long they are."""

    def choose(
        self, decode: Sequence[Candidate], prefill: Sequence[Candidate], ask: Ask
    ) -> tuple[Candidate, list[Candidate]]:
        return min(decode, key=self._load), sorted(prefill, key=self._load)

    def _load(self, one: Candidate) -> tuple[bool, int, float]:
        return one.suspect, requests_at(one), self._rng.random()


ROUTER = "router"
POLICIES: dict[str, type[Placer]] = {
    ROUTER: Placer,
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
}
"""By the name that ``--policy`` takes; the first is what the gateway does."""
