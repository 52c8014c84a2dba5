"""One hand-off: a prompt computed on a prefill replica, its KV sent to the decode replica.

1. the sequence joins prefill's queue, without blocks
2. its turn is near: decode reserves blocks for the prompt, now or when it has room
3. the session is open: chunks are computed, and each is sent while the next one computes
4. the hand-off token goes to the client at once
5. the last bytes have arrived: prefill lets go of its blocks, and the sequence joins the batch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ekiden.engine.scheduling.sequence import Gate, Sequence
from ekiden.sim.replica import Replica
from ekiden.sim.wire import send

if TYPE_CHECKING:
    from ekiden.sim.visit import Visit

MESSAGE_S = 5e-4
"""From one process to another."""
ANSWER_TIMEOUT_S = 20.0
"""How long decode may take to find room, as the services have it."""


class Handoff:
    """Between one prefill replica and a visit at a decode replica."""

    def __init__(self, visit: Visit, prefill: Replica) -> None:
        self.visit = visit
        self.asked = visit.asked
        self.prefill = prefill
        self.decode = visit.decode
        self.target: Sequence | None = None
        """On decode; its blocks are reserved."""
        self.sequence = prefill.sequence(visit.prompt, self.asked.output, Gate.CLOSED)
        self.over = False
        self.handed = False
        self._reserving = False
        self._moved = 0
        """Tokens whose KV decode has or has been sent."""
        self._arrives_at = 0.0

    def begin(self) -> None:
        self.prefill.callers[self] = None
        self.prefill.add(self.sequence, self)

    def leave(self) -> None:
        """Give it up on both sides; what became of it is the visit's to tell."""
        self.over = True
        self.prefill.callers.pop(self, None)
        self.prefill.remove(self.sequence)
        if self.target is not None:
            self.decode.remove(self.target)

    def lost(self) -> None:
        """The prefill replica is dead."""
        self.leave()
        self._after(MESSAGE_S, lambda: self.visit.handoff_failed(self))

    # What the prefill replica tells

    def ready(self) -> None:
        self._reserving = True
        self._after(MESSAGE_S, self._reserve)
        self._after(ANSWER_TIMEOUT_S, self._late)

    def started(self) -> None:
        self.visit.note_started()

    def computed(self, stop: int) -> None:
        """Send what decode lacks of the positions before ``stop``."""
        if stop <= self._moved:
            return
        costs = self.prefill.setup.costs
        size = costs.kv_bytes(stop) - costs.kv_bytes(self._moved)
        self._moved = stop
        now = self.visit.loop.now()
        seconds = size / self.visit.front.rate_between(self.prefill, self.decode)
        self._arrives_at = send(self.prefill.wire, self.decode.wire, seconds, now)
        self.visit.record.moved_bytes += size

    def sampled(self) -> None:
        """The last chunk has ended: its token goes up, and the rest of the KV."""
        self.handed = True
        loop = self.visit.loop
        self._after(MESSAGE_S, self._tell)
        loop.at(max(self._arrives_at, loop.now()) + MESSAGE_S, self._arrived)

    def finished(self) -> None:
        """Never: a hand-off is detached with its first token."""

    def preempted(self) -> None:
        """Never: its blocks are read by the transfer."""

    # Decode's side

    def _reserve(self) -> None:
        if self.over or not self._reserving:
            return
        target = self.decode.sequence(self.visit.prompt, self.asked.output)
        if not self.decode.reserve(target, self.visit):
            self.decode.wait_for_room(self._reserve)
            return
        self._reserving = False
        self.target, self._moved = target, target.cached
        self._after(MESSAGE_S, self._open)

    def _late(self) -> None:
        if self._reserving and not self.over:
            self.leave()
            self.visit.handoff_failed(self)

    def _open(self) -> None:
        if not self.over:
            self.prefill.open(self.sequence, self.sequence.number)

    def _tell(self) -> None:
        if not self.over:
            self.visit.hand_off(self)

    def _arrived(self) -> None:
        if self.over:
            return
        self.over = True
        self.prefill.callers.pop(self, None)
        self.prefill.remove(self.sequence)
        self.visit.adopt(self)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self.visit.loop.after(seconds, call)
